"""Runs the CPU kernels forward and backward once, for tools that count executed instructions.

Example:
    SELECTIVE_SCAN_CPU_CAPABILITY=avx2 valgrind --tool=callgrind --collect-atstart=no \\
        --toggle-collect='selective_scan::cpu::launch(selective_scan::ForwardParams*' \\
        python benchmarks/one_pass.py
"""

from __future__ import annotations

import torch

import selective_scan  # noqa: F401  registers the operators
from harness.arguments import make_parser, shape
from harness.operators import make_scan
from harness.problems import DTYPES, METHODS, VARIANTS, Problem


def main() -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    # fmt: off
    add("--shape", type=shape, default=shape("1,64,256,16"),
        help="batch,dim,seqlen,dstate[,groups] or a name")
    # fmt: on
    add("--dtype", choices=DTYPES, default="float32")
    add("--variant", choices=VARIANTS, default="plain")
    add("--method", choices=METHODS, default="zoh")
    options = parser.parse_args()
    torch.set_num_threads(1)
    problem = Problem(options.shape, options.dtype, VARIANTS[options.variant], options.method)
    scan = make_scan(problem, torch.device("cpu"), seed=0)
    scan.backward(scan.forward(True)[2])
    print(f"{problem}: {problem.updates} state updates forward, as many backward")


if __name__ == "__main__":
    main()
