"""A small, varied load of forward and backward passes on CUDA for compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/sanitizer_workload.py

Every kernel variant once: methods, dtypes, layouts, kinds of B and C, lengths around chunk
boundaries. Results are compared with the CPU kernels', so that a run is not vacuous.
"""

import os
import secrets

os.environ.setdefault("SELECTIVE_SCAN_TEST_SEED", str(secrets.randbelow(2**31)))

import torch

from problem import DTYPES, LAYOUTS, METHODS, Case, Error, run


def cases():
    lengths = (1, 31, 33, 70, 129)
    for index, method in enumerate(METHODS):
        for is_complex in (False, True):
            yield Case(
                complex=is_complex,
                method=method,
                seqlen=lengths[index % len(lengths)],
                dim=10,
                dstate=(16, 5, 33)[index % 3],
                reverse=bool(index % 2),
            )
    for is_complex in (False, True):
        base = Case(complex=is_complex, dim=6, seqlen=67)
        yield from (base.with_(dtype=dtype, dstate=7) for dtype in DTYPES)
        yield from (base.with_(layout=layout, dtype=torch.bfloat16) for layout in LAYOUTS)
        yield from (base.with_(groups=groups) for groups in (1, 3, 6))
        yield base.with_(B="constant", C="grouped", D=False, z=False)
        yield base.with_(B="shared", C="constant", initial_state=False)
        yield base.with_(dim=70, groups=1, dstate=3, seqlen=34)
        yield base.with_(dstate=130, dim=3, groups=1, seqlen=33)
    yield Case(complex=True, B="packed_grouped", C="packed_grouped", reverse=True, seqlen=65)
    yield Case(complex=True, B="packed", C="shared", groups=1, dtype=torch.float64)


def main() -> None:
    print(f"SELECTIVE_SCAN_TEST_SEED={os.environ['SELECTIVE_SCAN_TEST_SEED']}")
    count = 0
    for case in cases():
        on_cuda, on_cpu = run(case, "cuda"), run(case, "cpu")
        for name, expected in on_cpu.items():
            wide = torch.complex128 if expected.is_complex() else torch.float64
            error = Error.of(on_cuda[name].detach().cpu().to(wide), expected.detach().to(wide))
            limit = 2e-2 if expected.dtype in (torch.float16, torch.bfloat16) else 1e-4
            if error.relative_l2 > limit:
                raise SystemExit(f"{case}: {name} differs from the CPU's: {error}")
        count += 1
    print(f"{count} problems, forward and backward")


if __name__ == "__main__":
    main()
