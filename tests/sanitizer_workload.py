"""A small, varied load of forward and backward passes on CUDA for compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/sanitizer_workload.py [OPERATOR ...]

It runs every kernel variant once: methods, dtypes, layouts, kinds of B and C, lengths around chunk
boundaries. Results are compared with those of the CPU kernels or the reference, so that a run is
not vacuous. An OPERATOR is a name in CHECKS; without any, all of them run.
"""

import os
import secrets
import sys

os.environ.setdefault("SELECTIVE_SCAN_TEST_SEED", str(secrets.randbelow(2**31)))

import torch

import test_adaptive_unitary as unitary
import test_add_norm as norm
import test_causal_conv1d as conv
import test_causal_conv1d_pool as conv_pool
import test_causal_conv1d_update as conv_update
import test_diagonal_scan as diagonal
import test_dstate1 as dstate1
import test_float16_gradients as float16
import test_layouts as layouts
import test_mamba_inner_operator as mamba_inner
import test_matrix_scan as matrix
import test_packed as packed
import test_packed_operators as operators
import test_parts_of_scans as parts_of_scans
import test_paths as paths
import test_prompt as prompt
import test_s6_step as step
import test_selective_scan_prefill as prefill
import test_selective_state_update as update
import test_streamed_backward as streamed
from accuracy import Error
from problem import DTYPES, LAYOUTS, METHODS, Case, run


def selective_scan_cases():
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
        for dtype in (torch.float32, torch.float64):  # several warps per channel
            yield base.with_(dtype=dtype, dstate=130, dim=3, groups=1, seqlen=33)
    yield Case(complex=True, B="packed_grouped", C="packed_grouped", reverse=True, seqlen=65)
    yield Case(complex=True, B="packed", C="shared", groups=1, dtype=torch.float64)
    yield from special_cases()
    yield from packed_cases()


def special_cases():
    """Yields cases for the specialized kernels of the selective scan."""
    for dtype in (torch.float32, torch.bfloat16):
        for base in (dstate1.BASE, dstate1.MANY, *streamed.KINDS.values()):
            yield base.with_(dtype=dtype)
            yield base.with_(dtype=dtype, seqlen=64, reverse=True)
            yield base.with_(dtype=dtype, layout="channel_last")
        for names in (("u",), ("delta", "z")):
            yield layouts.case_on("cuda", dtype=dtype, layout="channel_last", layout_of=names)
        yield from (base.with_(dtype=dtype) for base in (prompt.BASE, prompt.WIDE, prompt.LONG))
        yield prompt.BASE.with_(dtype=dtype, seqlen=201)
        yield prompt.BASE.with_(dtype=dtype, seqlen=201, reverse=True)
        # Two states per lane.
        yield prompt.WIDE.with_(dtype=dtype, batch=3, seqlen=200)
        yield prompt.WIDE.with_(dtype=dtype, batch=3, dim=1096, layout="channel_last", seqlen=100)
        yield prompt.BASE.with_(dtype=dtype, dim=24, groups=2, layout="channel_last", seqlen=161)
        yield dstate1.BASE.with_(dtype=dtype, seqlen=520)
        yield from (dstate1.FEW.with_(dtype=dtype, seqlen=n) for n in (1032, 1304))
        yield from (dstate1.STATES.with_(dtype=dtype, seqlen=n, dim=400) for n in (49, 300))
        for base in paths.SEGMENTS.values():
            yield base.with_(dtype=dtype)
    # Dense rows of one state, in both directions of time.
    yield from (
        dstate1.MANY.with_(dtype=torch.bfloat16, seqlen=196, reverse=r) for r in (False, True)
    )
    yield from (streamed.REAL.with_(dim=12, batch=1, seqlen=1100, reverse=r) for r in (False, True))
    yield paths.LONG.with_(reverse=True, method="bilinear", decay=20.0)
    yield from (*float16.STREAMED.values(), float16.PACKED)
    yield from (*paths.SLICES[3:6], *paths.SLICES[7:9], *paths.COPIES[:3])


def diagonal_cases():
    base = diagonal.Case()
    for dtype in DTYPES:
        of = base.with_(a=dtype, b=dtype)
        for shape in ((3, 1), (5, 64), (2, 5, 67), (2, 3, 257), (70, 1000)):
            yield of.with_(shape=shape, reverse=len(shape) == 2)
        yield from of.each(shape=((2, 5, 67), (2, 40, 300), (1, 2, 5000)), layout=("channel_last",))
    for dtype in (torch.complex64, torch.complex128):
        of = base.with_(a=dtype, b=dtype, initial_state=dtype)
        yield from of.each(layout=("contiguous", "channel_last"))
    yield base.with_(a=torch.bfloat16, shape=(3, 5000))
    yield from base.each(a_shape=((5, 1),), layout=("contiguous", "channel_last"))
    yield base.with_(shape=(1, 5000), a_shape=(1, 1))


def unitary_cases():
    base = unitary.Case()
    yield from base.each(dstate=(1, 4, 7, 16, 33, 70))
    yield from base.with_(z=False, initial_state=False).each(seqlen=(1, 63, 64, 65, 200))
    yield base.with_(B="grouped", C="shared", groups=1)
    yield base.with_(B="grouped", C="grouped", dstate=20)
    yield base.with_(dtype=torch.float64, parameter_dtype=torch.float64)
    yield base.with_(dtype=torch.bfloat16, layout="channel_last")


def matrix_cases():
    yield from (matrix.BASE.with_(dstate=n, complex=c) for n in (1, 17, 64) for c in (False, True))
    yield from (case for case in matrix.CASES if not case.is_double)


def packed_cases():
    for base in (packed.BASE, packed.LONG):
        yield base
        yield base.with_(layout="channel_last", dtype=torch.bfloat16, reverse=True)
        yield base.with_(complex=True, dstate=5)
    yield packed.BASE.with_(cu_seqlens=(7, 40, 41, 100), B="constant")
    many = packed.LONG.with_(**packed.MANY_CHANNELS)
    yield many.with_(layout="channel_last", dtype=torch.bfloat16)
    yield many.with_(reverse=True)


def check_boundaries() -> int:
    cases = [(name, case) for name, several in operators.BAD_CASES.items() for case in several]
    for name, case in cases:
        operators.test_boundaries_that_do_not_rise_do_no_harm(name, case, "cuda")
    for every in (1, 3, 64):
        prefill.test_bad_values_do_no_harm(every, "cuda")
    return len(cases) + 3


def check_selective_scan(case, device) -> None:
    on_cuda, on_cpu = run(case, device), run(case, "cpu")
    for name, expected in on_cpu.items():
        wide = torch.complex128 if expected.is_complex() else torch.float64
        error = Error.of(on_cuda[name].detach().cpu().to(wide), expected.detach().to(wide))
        limit = 2e-2 if expected.dtype in (torch.float16, torch.bfloat16) else 1e-4
        if error.relative_l2 > limit:
            raise SystemExit(f"{case}: {name} differs from the CPU's: {error}")


def check_all(check, cases) -> int:
    cases = list(cases)
    for case in cases:
        check(case, "cuda")
    return len(cases)


def check_mamba_inner(case, device) -> None:
    for autocast in (False, True):
        mamba_inner.test_a_layer_is_what_its_parts_are(case, autocast, device)


CHECKS = {
    "selective_scan": lambda: check_all(check_selective_scan, selective_scan_cases()),
    "diagonal": lambda: check_all(diagonal.check, diagonal_cases()),
    "packed_diagonal": lambda: check_all(diagonal.check, diagonal.PACKED_CASES),
    "boundaries": check_boundaries,
    "adaptive_unitary": lambda: check_all(unitary.check, unitary_cases()),
    "parts_of_scans": lambda: check_all(parts_of_scans.check, parts_of_scans.CASES),
    "matrix": lambda: check_all(
        lambda case, device: matrix.check(case, device=device), matrix_cases()
    ),
    "mamba_inner": lambda: check_all(check_mamba_inner, mamba_inner.OP_CASES),
    "convolution": lambda: check_all(conv.check, conv.case_list()),
    "convolution_update": lambda: check_all(conv_update.check, conv_update.CASES),
    "convolution_pool": lambda: check_all(
        conv_pool.test_matches_sequences_one_by_one, conv_pool.CASES
    ),
    "prefill": lambda: check_all(prefill.check, prefill.case_list()),
    "state_update": lambda: check_all(update.check, update.case_list()),
    "narrow": lambda: check_all(paths.check, paths.FEW_NARROW),
    "step": lambda: check_all(step.check, step.CASES),
    "norm": lambda: check_all(norm.check, norm.CASES),
}


def main() -> None:
    print(f"SELECTIVE_SCAN_TEST_SEED={os.environ['SELECTIVE_SCAN_TEST_SEED']}")
    for name in sys.argv[1:] or CHECKS:
        print(f"{name}: {CHECKS[name]()} problems, forward and backward")


if __name__ == "__main__":
    main()
