"""Full state matrices, A (dim, dstate, dstate): kernels against the reference in fp64, against the
matrix exponential, and against known properties of matrices."""

import itertools
from functools import partial

import pytest
import scipy.linalg
import torch

import problem
from accuracy import Error, assert_same_bits, complaint, tolerance, worst_error
from opchecks import opcheck_forward
from problem import (
    Case,
    check_against,
    generator,
    inputs_on,
    make,
    moved,
    plain_solutions,
    results_of,
)
from selective_scan import selective_scan_fn, selective_scan_ref

F32, F64, C64, C128 = torch.float32, torch.float64, torch.complex64, torch.complex128
BASE = Case(dim=4, seqlen=70, dstate=5, method="bilinear")


def random_matrix(random, dim, n, is_complex):
    """Returns stable matrices: a negative definite part plus a skew-Hermitian one."""

    def normal():
        part = torch.randn(dim, n, n, generator=random, dtype=F64)
        if not is_complex:
            return part
        return torch.complex(part, torch.randn(dim, n, n, generator=random, dtype=F64))

    root, skew = normal() / n**0.5, normal() / n**0.5
    identity = torch.eye(n, dtype=F64)
    return skew - skew.mH - root @ root.mH - 0.2 * identity


def tensors_of(case: Case) -> dict[str, torch.Tensor | None]:
    """Returns the tensors of the case, with matrices as A."""
    tensors = dict(make(case).tensors)
    matrix = random_matrix(generator(("A", case.data)), case.dim, case.dstate, case.complex)
    return tensors | {"A": matrix.to(tensors["A"].dtype)}


def solve(case: Case, inputs, scan=selective_scan_ref) -> dict[str, torch.Tensor]:
    """Returns outputs and gradients."""
    scanned = scan(**inputs, **make(case).options, return_last_state=True)
    return results_of(scanned, inputs, make(case).cotangents)


def run(case: Case, tensors, device="cpu"):
    """Returns the results of the kernels."""
    return solve(case, inputs_on(case, device, tensors), selective_scan_fn)


def exact_results(case: Case, tensors):
    return solve(case, moved(tensors, F64))


def plain_results(case: Case, tensors, count: int = 4) -> list[dict[str, torch.Tensor]]:
    return plain_solutions(partial(solve, case), tensors, case.is_double, count)


def check(case: Case, tensors=None, device="cpu") -> None:
    # The layout "expanded" changes values.
    tensors = inputs_on(case, "cpu", tensors or tensors_of(case))
    exact, actual = exact_results(case, tensors), run(case, tensors, device)
    plain = partial(plain_results, case, tensors)
    check_against(exact, plain, case, tensors, actual, device)


CASES = [
    BASE,
    BASE.with_(complex=True),
    BASE.with_(dtype=F64),
    BASE.with_(dtype=F64, complex=True, B="packed", C="constant"),
    BASE.with_(dtype=torch.bfloat16),
    BASE.with_(dtype=torch.float16, complex=True, B="packed_grouped", C="packed_grouped"),
    BASE.with_(B="constant", C="shared"),
    BASE.with_(B="constant", C="constant"),
    BASE.with_(complex=True, B="constant", C="constant"),
    BASE.with_(reverse=True),
    BASE.with_(complex=True, reverse=True, B="packed", C="shared"),
    BASE.with_(D=False, z=False, delta_bias=False, initial_state=False, delta_softplus=False),
    BASE.with_(cotangents=("last_state",)),
    BASE.with_(cotangents=("out",), z=False),
    BASE.with_(pole_dtype=F64, projection_dtype=torch.bfloat16),
    BASE.with_(layout="channel_last"),
    BASE.with_(layout="sliced", complex=True),
    BASE.with_(layout="dim_first", reverse=True),
    BASE.with_(layout="expanded"),
    BASE.with_(dim=40, groups=2, seqlen=33),  # several vectors of channels, the last not full
    BASE.with_(dim=33, groups=1, seqlen=33, complex=True),
    BASE.with_(batch=1, groups=4, seqlen=1),
    BASE.with_(seqlen=32),
    BASE.with_(seqlen=64),
]
EVENTS = BASE.with_(input_delta=F32)
CASES += [
    EVENTS,
    EVENTS.with_(complex=True),
    EVENTS.with_(reverse=True, B="constant", C="shared"),
    EVENTS.with_(complex=True, reverse=True, B="packed", C="constant"),
    EVENTS.with_(B="constant", C="constant"),
    EVENTS.with_(D=False, z=False, delta_bias=False, initial_state=False, delta_softplus=False),
    EVENTS.with_(cotangents=("last_state",)),
    EVENTS.with_(dtype=torch.bfloat16, layout="channel_last"),
    EVENTS.with_(dtype=torch.float16, layout="sliced", complex=True),
    EVENTS.with_(layout="dim_first", reverse=True),
    EVENTS.with_(layout="expanded"),
    EVENTS.with_(dim=40, groups=2, seqlen=33),
    EVENTS.with_(dim=33, groups=1, seqlen=31, complex=True),
    EVENTS.with_(dim=3, groups=1, dstate=64, seqlen=9),
    EVENTS.with_(batch=1, groups=4, seqlen=1),
    EVENTS.with_(seqlen=64),
    BASE.with_(input_delta=torch.bfloat16),
    BASE.with_(input_delta=torch.float16, complex=True),
    BASE.with_(input_delta=F64),
    BASE.with_(input_delta=F64, dtype=F64, complex=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_the_reference(case, device):
    check(case, device=device)


@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("dstate", [1, 2, 3, 4, 17, 64])
def test_orders(dstate, dtype, is_complex, device):
    seqlen = 9 if dstate == 64 else 40
    sizes = {"dstate": dstate, "dim": 3, "groups": 1, "seqlen": seqlen, "batch": 1}
    case = BASE.with_(complex=is_complex, dtype=dtype, **sizes)
    check(case, device=device)


@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
def test_events_at_the_same_time_add_up(is_complex, device):
    """At steps with Δ = 0 nothing decays, and the input enters by its own steps."""
    case = EVENTS.with_(complex=is_complex, delta_softplus=False, delta_bias=False)
    tensors = tensors_of(case)
    tensors["delta"] = tensors["delta"].clone()
    tensors["delta"][..., ::3] = 0
    check(case, tensors, device)


# --- matrices that are hard for decompositions ----------------------------------------------------


def jordan_block(n):
    return torch.diag(torch.full((n,), -0.5, dtype=F64)) + torch.diag(torch.ones(n - 1), 1)


def companion(n):
    """Returns the companion matrix of a polynomial with roots between -1 and -0.5."""
    polynomial = torch.ones(1, dtype=F64)
    for root in torch.linspace(0.5, 1, n, dtype=F64):
        padded = torch.nn.functional.pad(polynomial, (0, 1))
        polynomial = padded + root * torch.nn.functional.pad(polynomial, (1, 0))
    matrix = torch.diag(torch.ones(n - 1, dtype=F64), -1)
    matrix[0] = -polynomial[1:]
    return matrix


def skew(n, random):
    part = torch.randn(n, n, generator=random, dtype=F64) / n**0.5
    return part - part.mT


def permutation(n):
    """Returns a matrix for which Δ/2 = 1 gives zeros where elimination looks for a pivot."""
    return torch.roll(torch.eye(n, dtype=F64), 1, 0) + torch.eye(n, dtype=F64)


@pytest.mark.parametrize("n", [3, 8, 17])
@pytest.mark.parametrize("kind", ["jordan", "companion", "skew", "zero", "triangular"])
def test_matrices_that_are_not_normal_or_defective(kind, n, device):
    """The error is within eight times that of the reference in the same precision."""
    random = generator((kind, n))
    matrix = {
        "jordan": lambda: jordan_block(n),
        "companion": lambda: companion(n),
        "skew": lambda: skew(n, random),
        "zero": lambda: torch.zeros(n, n, dtype=F64),
        "triangular": lambda: random_matrix(random, 1, n, False)[0].triu(),
    }[kind]()
    case = BASE.with_(dstate=n, dim=3, groups=1, batch=1)
    tensors = tensors_of(case)
    tensors["A"] = matrix.expand(3, n, n).to(F32)
    exact = exact_results(case, tensors)
    plain = plain_results(case, tensors)
    for name, value in run(case, tensors, device).items():
        own = Error.of(value.double().cpu(), exact[name]).relative_l2
        reference = worst_error(plain, exact, name)
        assert own <= max(8 * reference, 3e-7), (name, own, reference)


def assert_near_reference(results, case, tensors):
    """Asserts that results in fp32 are close to the reference's in fp64."""
    exact, plain = exact_results(case, tensors), plain_results(case, tensors)
    for name, value in results.items():
        tol = tolerance(name, F32, False)
        reason = complaint(value, exact[name], tol, [result[name] for result in plain])
        assert not reason, f"{name}: {reason}"


@pytest.mark.parametrize("base", [BASE, EVENTS], ids=["", "input_delta"])
@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
def test_large_steps_exchange_rows(is_complex, base, device):
    """Elimination without row exchanges would divide by zero or by small numbers."""
    case = base.with_(
        complex=is_complex, delta_softplus=False, delta_bias=False, dstate=6, seqlen=6
    )
    tensors = tensors_of(case)
    tensors["A"] = tensors["A"] - tensors["A"].diagonal(dim1=1, dim2=2).diag_embed()
    tensors["A"][:2] = permutation(6).to(tensors["A"].dtype)
    tensors["delta"] = torch.full_like(tensors["delta"], 2.0)
    tensors["delta"][:, 2:] = 5.0
    assert_near_reference(run(case, tensors, device), case, tensors)


@pytest.mark.parametrize("base", [BASE, EVENTS], ids=["", "input_delta"])
@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
def test_gradients_of_very_large_steps(is_complex, base, device):
    """A step almost reverses the state, so the state in its middle is a difference that cancels."""
    case = base.with_(complex=is_complex, delta_softplus=False, delta_bias=False)
    tensors = tensors_of(case)
    steps = torch.rand(tensors["delta"].shape, generator=generator(("steps", case.data)))
    tensors["delta"] = 5e3 + 1e4 * steps
    assert_near_reference(run(case, tensors, device), case, tensors)


@pytest.mark.parametrize("base", [BASE, EVENTS], ids=["", "input_delta"])
@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
def test_a_diagonal_matrix_is_the_diagonal_operator(is_complex, base, device):
    case = base.with_(complex=is_complex)
    tensors = make(case).tensors
    results = run(case, tensors | {"A": tensors["A"].diag_embed()}, device)
    results["dA"] = results["dA"].diagonal(dim1=1, dim2=2)
    assert_near_reference(results, case, tensors)


@pytest.mark.parametrize("scale", [0.1, 1.0])
@pytest.mark.parametrize("is_constant", [True, False], ids=["constant steps", "steps"])
def test_a_skew_matrix_keeps_the_norm(scale, is_constant, device):
    """Holds for 10,000 steps in fp32, also if a constant step rounds alike in each of them."""
    dim, n, seqlen = 16, 4, 10000
    random = generator((scale, is_constant))
    A = torch.stack([skew(n, random) for _ in range(dim)]).to(F32)
    initial = torch.randn(1, dim, n, generator=random)
    delta = torch.full((1, dim, seqlen), scale)
    if not is_constant:
        delta = 2 * scale * torch.rand(1, dim, seqlen, generator=random)
    B = torch.zeros(dim, n, device=device)
    delta, initial = delta.to(device), initial.to(device)
    options = {"discretization_method": "bilinear", "initial_state": initial}
    given = (torch.zeros_like(delta), delta, A.to(device), B, B)
    _, last = selective_scan_fn(*given, return_last_state=True, **options)
    ratio = last.double().norm(dim=-1) / initial.double().norm(dim=-1)
    assert (ratio - 1).abs().max() <= 1e-4


def test_order_of_convergence():
    """Errors against the matrix exponential, with a held input, fall as Δ²."""
    random = generator("order")
    n = 6
    A = random_matrix(random, 1, n, False)
    B = torch.randn(1, n, generator=random, dtype=F64)
    initial = torch.randn(1, 1, n, generator=random, dtype=F64)
    system = torch.zeros(n + 1, n + 1, dtype=F64)
    system[:n, :n], system[:n, n] = A[0], B[0]
    start = torch.cat([initial[0, 0], torch.ones(1, dtype=F64)])
    exact = torch.from_numpy(scipy.linalg.expm(system.numpy())) @ start
    errors, options = [], {"discretization_method": "bilinear", "initial_state": initial}
    for steps in (16, 32, 64, 128):
        u = torch.ones(1, 1, steps, dtype=F64)
        _, last = selective_scan_fn(u, u / steps, A, B, B, return_last_state=True, **options)
        errors.append((last[0, 0] - exact[:n]).norm().item())
    ratios = [a / b for a, b in itertools.pairwise(errors)]
    assert all(3.8 < ratio < 4.2 for ratio in ratios), errors


# --- independence ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
def test_a_singular_step_stays_in_its_channel(is_complex, device):
    """No bit of any other channel changes, since lanes do not interact."""
    case = BASE.with_(complex=is_complex, dim=6, groups=1, delta_softplus=False, delta_bias=False)
    tensors = tensors_of(case)
    good = run(case, tensors, device)
    tensors["A"][3] = torch.eye(case.dstate)
    delta = tensors["delta"].clone()
    delta[:, 3, 40] = 2.0
    bad = run(case, tensors | {"delta": delta}, device)
    others = [0, 1, 2, 4, 5]
    for name in ("out", "last_state", "du", "ddelta", "dz", "dinitial_state"):
        assert torch.equal(bad[name][:, others], good[name][:, others]), name
    for name in ("dA", "dD"):
        assert torch.equal(bad[name][others], good[name][others]), name
    assert not bad["out"][:, 3, 40:].isfinite().any()
    assert not bad["last_state"][:, 3].isfinite().all()
    assert bad["out"][:, 3, :40].isfinite().all()


def test_a_sequence_depends_on_no_other():
    """No bit of a sequence or channel depends on others, even if a step of another one exchanges
    rows that it leaves in place."""
    case = BASE.with_(batch=3, dim=20, groups=1, B="constant", C="constant")
    tensors = tensors_of(case)
    tensors["delta"][0] += 5.0
    tensors["delta"][1, ::2] += 5.0
    tensors["A"] = tensors["A"] * torch.linspace(0.1, 3, 20)[:, None, None]
    together = run(case, tensors)
    for batch in range(3):
        for channels in (slice(0, 1), slice(3, 20)):
            part = {}
            for name, value in tensors.items():
                has_batch = name not in ("A", "B", "C", "D", "delta_bias")
                part[name] = value[batch : batch + 1, channels] if has_batch else value[channels]
            out, last = selective_scan_fn(**part, **make(case).options, return_last_state=True)
            assert torch.equal(out, together["out"][batch : batch + 1, channels])
            assert torch.equal(last, together["last_state"][batch : batch + 1, channels])


# --- the ops in PyTorch ---------------------------------------------------------------------------


def op_arguments(case, requires_grad, device="cpu"):
    """Returns the arguments that both ops take."""
    inputs = inputs_on(case, device, tensors_of(case))
    op = torch.ops.selective_scan.matrix_scan_fwd
    return problem.op_arguments(case, inputs, requires_grad, op)


OP_CASES = [
    BASE.with_(dstate=3),
    BASE.with_(dstate=3, complex=True, B="packed", C="constant", D=False, z=False),
    BASE.with_(dstate=3, initial_state=False, seqlen=20, dtype=torch.bfloat16),
    EVENTS.with_(dstate=3),
    BASE.with_(seqlen=0),
    BASE.with_(batch=0),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", OP_CASES, ids=str)
def test_opcheck(case, device):
    ops = torch.ops.selective_scan
    opcheck_forward(ops.matrix_scan_fwd.default, op_arguments(case, True, device))
    inputs = op_arguments(case, False, device)
    out, last_state, states = ops.matrix_scan_fwd(*inputs, True)
    for given in ((out, last_state, *inputs, states), (None, last_state, *inputs, None)):
        torch.library.opcheck(ops.matrix_scan_bwd.default, given)


def test_states_that_were_not_saved_are_computed_again(device):
    case = BASE.with_(dstate=3)
    ops = torch.ops.selective_scan
    inputs = op_arguments(case, False, device)
    out, last_state, states = ops.matrix_scan_fwd(*inputs, True)
    given = ops.matrix_scan_bwd(out, last_state, *inputs, states)
    again = ops.matrix_scan_bwd(out, last_state, *inputs, None)
    assert given[-1] is None  # of input_delta
    assert_same_bits(given, again)


# --- bad calls ------------------------------------------------------------------------------------


def test_the_op_takes_bilinear_alone():
    arguments = list(op_arguments(BASE, False))
    arguments[9] = "zoh"
    with pytest.raises(RuntimeError, match="must be one of bilinear, got 'zoh'"):
        torch.ops.selective_scan.matrix_scan_fwd(*arguments)


def test_cuda_takes_64_states(cuda_device):
    case = BASE.with_(dstate=65, seqlen=2)
    tensors = {name: value.to(cuda_device) for name, value in tensors_of(case).items()}
    with pytest.raises(RuntimeError, match="A must have dstate of at most 64 on cuda:0, got"):
        selective_scan_fn(**tensors, **make(case).options)
