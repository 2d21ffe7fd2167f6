"""Runs the CPU kernels forward and backward once, for tools that count what a pass executes.

Example:
    SELECTIVE_SCAN_CPU_CAPABILITY=avx2 valgrind --tool=callgrind --collect-atstart=no \\
        --toggle-collect='selective_scan::cpu::scan_forward(*' python benchmarks/one_pass.py
"""

from __future__ import annotations

import torch

from arguments import make_parser
from problems import DTYPES, METHODS, VARIANTS, Problem, make_inputs, parse_shape


def main() -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--shape", default="1,64,256,16", help="batch,dim,seqlen,dstate[,groups] or a name")
    add("--dtype", choices=DTYPES, default="float32")
    add("--variant", choices=VARIANTS, default="plain")
    add("--method", choices=METHODS, default="zoh")
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        shape = parse_shape(options.shape)
    except ValueError as error:
        parser.error(str(error))
    problem = Problem(shape, options.dtype, VARIANTS[options.variant], options.method)
    inputs = make_inputs(problem, torch.device("cpu"), seed=0)
    _, _, states = inputs.forward_op(True)
    inputs.backward_op(states)
    print(f"{problem}: {shape.updates} state updates forward, as many backward")


if __name__ == "__main__":
    main()
