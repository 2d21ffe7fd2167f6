"""Problems for the selective scan: a `Case` describes one, `make` draws its data, `run` solves it,
and `check` compares a backend's outputs and gradients with the reference in float64."""

import functools
import itertools
import os
import zlib
from dataclasses import dataclass

import torch

import oracle
from accuracy import assert_same_bits, complaint, tolerance
from cases import Axes
from opchecks import in_order
from selective_scan import selective_scan_fn
from selective_scan._discretization import DISCRETIZATIONS

METHODS = tuple(DISCRETIZATIONS)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# In the order of the ops' arguments and of their gradients.
TENSORS = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state", "input_delta")
# The kinds of B and C. "shared" is (batch, N, seqlen), "grouped" (batch, groups, N, seqlen),
# "packed" complex numbers interleaved in real tensors.
REAL_KINDS = ("constant", "shared", "grouped")
COMPLEX_KINDS = ("constant", "shared", "grouped", "packed", "packed_grouped")
LAYOUTS = ("contiguous", "channel_last", "dim_first", "sliced", "offset", "expanded")


@dataclass(frozen=True)
class Case(Axes):
    """One problem. The defaults are the base case, and tests change one axis at a time."""

    batch: int = 2
    dim: int = 6
    seqlen: int = 70
    dstate: int = 16
    groups: int = 2
    method: str = "zoh"
    complex: bool = False
    dtype: torch.dtype = torch.float32  # of u, delta and z
    delta_dtype: torch.dtype | None = None  # None: dtype
    z_dtype: torch.dtype | None = None  # None: dtype
    projection_dtype: torch.dtype | None = None  # of B and C; None: dtype
    pole_dtype: torch.dtype | None = None  # of A; None: float32 or float64
    initial_dtype: torch.dtype | None = None  # of initial_state; None: as pole_dtype
    channel_dtype: torch.dtype | None = None  # of D and delta_bias; None: as pole_dtype
    B: str = "grouped"
    C: str = "grouped"
    D: bool = True
    z: bool = True
    delta_bias: bool = True
    delta_softplus: bool = True
    initial_state: bool = True
    reverse: bool = False
    cu_seqlens: tuple[int, ...] | None = None  # needs a batch of 1
    input_delta: torch.dtype | None = None  # None: the input has no separate steps
    layout: str = "contiguous"
    layout_of: tuple[str, ...] = TENSORS  # which tensors have that layout
    cotangents: tuple[str, ...] = ("out", "last_state")  # outputs that the loss depends on
    decay: float = 1.0  # scales A: small for slow memories
    step_shift: float = 0.0  # added to delta before softplus: negative for small steps

    @property
    def data(self) -> "Case":
        """The case with the same values: layouts only move values, but expansion repeats some."""
        if self.layout == "expanded":
            return self
        return self.with_(layout="contiguous", layout_of=TENSORS)

    @property
    def is_double(self) -> bool:
        rows = (self.dtype, self.delta_dtype, self.z_dtype, self.input_delta)
        others = (self.projection_dtype, self.pole_dtype, self.initial_dtype, self.channel_dtype)
        return torch.float64 in (*rows, *others)

    @staticmethod
    def short(value: object) -> str:
        return "+".join(map(str, value)) if isinstance(value, tuple) else Axes.short(value)


@dataclass(frozen=True)
class Problem:
    tensors: dict[str, torch.Tensor]
    options: dict
    cotangents: dict[str, torch.Tensor]


def generator(name: object) -> torch.Generator:
    """Returns a generator that depends only on the run's seed and on `name`."""
    text = f"{os.environ['SELECTIVE_SCAN_TEST_SEED']}/{name}"
    return torch.Generator().manual_seed(zlib.crc32(text.encode()))


class Draws:
    """Random tensors on the CPU, by default float64, that depend only on the run's seed and a
    name."""

    def __init__(self, name: object) -> None:
        self.generator = generator(name)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(shape, generator=self.generator, dtype=wide).to(dtype)

    def uniform(self, low: float, high: float, *shape: int) -> torch.Tensor:
        values = torch.rand(shape, generator=self.generator, dtype=torch.float64)
        return low + (high - low) * values


def make(case: Case) -> Problem:
    """Draws contiguous data of moderate size on the CPU, with stable poles and positive steps."""
    return _make(case.data)


@functools.lru_cache(maxsize=8)
def _make(case: Case) -> Problem:
    draws = Draws(case)
    normal, uniform = draws.normal, draws.uniform

    def projection(kind):
        if kind == "constant":
            shape = (case.dim, case.dstate)
        elif kind in ("shared", "packed"):
            shape = (case.batch, case.dstate, case.seqlen)
        else:
            shape = (case.batch, case.groups, case.dstate, case.seqlen)
        if not case.complex:
            return normal(*shape)
        value = torch.complex(normal(*shape), normal(*shape))
        return torch.view_as_real(value).flatten(-2) if kind.startswith("packed") else value

    sequence = (case.batch, case.dim, case.seqlen)
    sequences = case.batch if case.cu_seqlens is None else len(case.cu_seqlens) - 1
    state = (sequences, case.dim, case.dstate)
    A = -case.decay * uniform(0.2, 2.0, case.dim, case.dstate)
    if case.complex:
        A = torch.complex(A, case.decay * uniform(-3.0, 3.0, case.dim, case.dstate))
    # The raw step is shifted such that softplus gives steps of about the size used without it.
    if case.delta_softplus:
        delta = normal(*sequence) + (case.step_shift - 1.0)
    else:
        delta = uniform(0.05, 0.6, *sequence)
    delta_bias = uniform(0.0, 0.3, case.dim)
    values = {
        "u": normal(*sequence),
        "delta": delta,
        "A": A,
        "B": projection(case.B),
        "C": projection(case.C),
        "D": normal(case.dim) if case.D else None,
        "z": normal(*sequence) if case.z else None,
        "delta_bias": delta_bias if case.delta_bias else None,
        "initial_state": None,
    }
    if case.initial_state:
        h = normal(*state)
        values["initial_state"] = torch.complex(h, normal(*state)) if case.complex else h
    if case.input_delta is not None:
        values["input_delta"] = normal(*sequence)

    pole_dtype = case.pole_dtype or (
        torch.float64 if case.dtype == torch.float64 else torch.float32
    )
    dtypes = {"u": case.dtype, "delta": case.delta_dtype or case.dtype}
    dtypes |= {"z": case.z_dtype or case.dtype, "input_delta": case.input_delta}
    dtypes |= dict.fromkeys(("B", "C"), case.projection_dtype or case.dtype)
    dtypes |= {"A": pole_dtype, "initial_state": case.initial_dtype or pole_dtype}
    dtypes |= dict.fromkeys(("D", "delta_bias"), case.channel_dtype or pole_dtype)
    tensors = {}
    for index, (name, value) in enumerate(values.items()):
        if value is None:
            tensors[name] = None
            continue
        if case.layout == "expanded" and name in case.layout_of:
            value = expand_one_dim(value, index)
        tensors[name] = value.to(counterpart(dtypes[name], value.is_complex()))

    state_dtype = counterpart(torch.float64 if case.is_double else torch.float32, case.complex)
    cotangents = {}
    if "out" in case.cotangents:
        cotangents["out"] = normal(*sequence).to(case.dtype)
    if "last_state" in case.cotangents:
        value = torch.complex(normal(*state), normal(*state)) if case.complex else normal(*state)
        cotangents["last_state"] = value.to(state_dtype)
    options = {
        "delta_softplus": case.delta_softplus,
        "discretization_method": case.method,
        "reverse": case.reverse,
    }
    if case.cu_seqlens is not None:
        options["cu_seqlens"] = torch.tensor(case.cu_seqlens)
    return Problem(tensors, options, cotangents)


def counterpart(dtype: torch.dtype, is_complex: bool) -> torch.dtype:
    if not is_complex:
        return dtype
    return torch.complex128 if dtype == torch.float64 else torch.complex64


def expand_one_dim(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """Gives dimension `index` (modulo the rank) a stride of 0, so that it differs among tensors."""
    if tensor.numel() == 0:
        return tensor
    return tensor.narrow(index % tensor.dim(), 0, 1).expand(tensor.shape)


def laid_out(
    tensors: dict, layout: str, device: str, vectors: bool = True, requires_grad: bool = True
) -> dict:
    """Returns named tensors, some of which may be None, as leaves with a layout on a device.
    Without `vectors`, tensors of one dimension stay as they are."""
    made = {}
    for index, (name, tensor) in enumerate(tensors.items()):
        if tensor is not None:
            of_it = layout if vectors or tensor.dim() > 1 else "contiguous"
            tensor = lay_out(tensor.to(device), of_it, index).detach()
            tensor.requires_grad_(requires_grad)
        made[name] = tensor
    return made


def lay_out(tensor: torch.Tensor, layout: str, index: int = 0) -> torch.Tensor:
    """Returns the same values in another memory layout."""
    rank = tensor.dim()
    if layout == "contiguous" or (rank < 2 and layout in ("channel_last", "dim_first")):
        return tensor.contiguous()
    if layout == "channel_last":  # steps before channels or states; for rank 2, transposed
        to = min(1, rank - 2)
        return tensor.movedim(-1, to).contiguous().movedim(to, -1)
    if layout == "wider_rows":  # channel-last, in the second half of every row
        to = min(1, rank - 2)
        rows = tensor.movedim(-1, to)
        wide = rows.new_empty(*rows.shape[:-1], 2 * rows.shape[-1])
        return wide[..., rows.shape[-1] :].copy_(rows).movedim(to, -1)
    if layout == "dim_first":
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "sliced":
        padded = tensor.new_empty(
            [size + 2 for size in tensor.shape[:-1]] + [2 * tensor.shape[-1] + 3]
        )
        view = padded
        for dim, size in enumerate(tensor.shape):
            step = 2 if dim == rank - 1 else 1
            view = view.movedim(dim, 0)[1 : 1 + step * size : step].movedim(0, dim)
        return view.copy_(tensor)
    if layout == "offset":  # a data pointer aligned to one element only
        return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)
    if layout == "padded_rows":  # rows of any length begin at aligned addresses
        wide = tensor.new_empty(*tensor.shape[:-1], tensor.shape[-1] + -tensor.shape[-1] % 8)
        return wide[..., : tensor.shape[-1]].copy_(tensor)
    if layout == "expanded":
        return expand_one_dim(tensor, index)
    raise ValueError(layout)


def inputs_on(case: Case, device: str, tensors: dict | None = None) -> dict:
    """Returns the case's tensors, or others in their place, as leaves that require grad, on
    `device`, in the case's layout."""
    inputs = {}
    for index, (name, value) in enumerate((tensors or make(case).tensors).items()):
        if value is not None:
            layout = case.layout if name in case.layout_of else "contiguous"
            # A matrix of equal rows or columns would not be stable, so A is expanded over channels.
            along = 0 if name == "A" and value.dim() == 3 else index
            value = lay_out(value.to(device), layout, along).detach().requires_grad_()
        inputs[name] = value
    return inputs


def detached(inputs: dict) -> dict:
    """Returns the same tensors, detached from the graph."""
    return {name: None if value is None else value.detach() for name, value in inputs.items()}


def options_on(case: Case, device: str | torch.device) -> dict:
    options = make(case).options
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }


def op_arguments(case: Case, inputs: dict, requires_grad: bool = False, op=None) -> tuple:
    """Returns the arguments that a scan's forward and backward op share."""
    inputs = inputs if requires_grad else detached(inputs)
    op = op or torch.ops.selective_scan.selective_scan_fwd
    return in_order(op, inputs | options_on(case, inputs["u"].device))[:-1]


def differentiate(outputs: dict, inputs: dict, cotangents: dict) -> dict[str, torch.Tensor]:
    """Returns the gradients of the inputs that are not None, named "du", "ddelta" and so on."""
    present = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    gradients = torch.autograd.grad(
        [outputs[name] for name in cotangents],
        list(present.values()),
        list(cotangents.values()),
        allow_unused=True,
    )
    return {f"d{name}": grad for name, grad in zip(present, gradients, strict=True)}


def results_of(out_and_state: tuple, inputs: dict, cotangents: dict) -> dict[str, torch.Tensor]:
    """Returns out, last_state and the gradients of the inputs. The cotangents, by the names of the
    outputs, are moved and cast to those."""
    outputs = dict(zip(("out", "last_state"), out_and_state, strict=True))
    given = {name: value.to(outputs[name]) for name, value in cotangents.items()}
    return outputs | differentiate(outputs, inputs, given)


def scan(case: Case, inputs: dict, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out and last_state of the inputs, with the case's options or others."""
    options = options_on(case, inputs["u"].device) | options
    return selective_scan_fn(**inputs, **options, return_last_state=True)


def run_on(case: Case, inputs: dict, **options) -> dict[str, torch.Tensor]:
    """Returns the outputs and gradients of inputs that may be others than the case's own."""
    return results_of(scan(case, inputs, **options), inputs, make(case).cotangents)


def run(case: Case, device: str = "cpu", backend: str = "auto") -> dict[str, torch.Tensor]:
    """Returns the outputs and gradients of a backend."""
    return run_on(case, inputs_on(case, device), backend=backend)


def reference(case: Case) -> dict[str, torch.Tensor]:
    """Returns exact outputs and gradients, computed in float64 from the same, rounded inputs."""
    return _reference(case.data)


@functools.lru_cache(maxsize=16)
def _reference(case: Case) -> dict[str, torch.Tensor]:
    return _solve(case, moved(make(case).tensors, torch.float64))


def moved(tensors: dict, dtype: torch.dtype, nudge: int = 0) -> dict:
    """Returns the tensors in `dtype`, as leaves on the CPU that require grad. A nonzero `nudge`
    seeds a random change of every value by up to one rounding error of `dtype`."""
    random = generator(f"nudge {nudge}")

    def move(tensor):
        value = tensor.detach().cpu()
        if nudge:
            noise = 2 * torch.rand(value.shape, generator=random, dtype=torch.float64) - 1
            value = value * (1 + torch.finfo(dtype).eps * noise)
        return value.to(counterpart(dtype, value.is_complex()), copy=True).requires_grad_()

    return {name: None if tensor is None else move(tensor) for name, tensor in tensors.items()}


def plain_solutions(solve, tensors: dict, is_double: bool = False, count: int = 4) -> list:
    """Returns what `solve`, in plain arithmetic, computes from the tensors in the precision of the
    kernels, and from tensors within a rounding error of them.

    If terms cancel, for example in a gradient summed over batch and steps, a single result may be
    accurate by chance. Several results show how well conditioned the problem is.
    """
    dtype = torch.float64 if is_double else torch.float32
    return [solve(moved(tensors, dtype, nudge)) for nudge in range(count)]


@functools.lru_cache(maxsize=16)
def plain_results(case: Case, count: int = 4) -> list[dict[str, torch.Tensor]]:
    solve = functools.partial(_solve, case)
    return plain_solutions(solve, make(case).tensors, case.is_double, count)


def _solve(case: Case, inputs: dict) -> dict[str, torch.Tensor]:
    """Computes outputs and gradients by plain loops over time, in the dtype of the inputs."""
    scanned = scan_sequences(oracle.scan, inputs, dict(make(case).options))
    return results_of(scanned, inputs, make(case).cotangents)


def part_of(inputs: dict, begin: int, end: int) -> dict:
    """Returns the inputs of some steps; B and C may be constant, or have two numbers a step."""
    seqlen, part = inputs["u"].shape[-1], dict(inputs)
    for name in ("u", "delta", "B", "C", "z", "input_delta", "mix"):
        tensor = inputs.get(name)
        if tensor is not None and tensor.dim() > 2:
            per_step = tensor.shape[-1] // max(seqlen, 1)
            part[name] = tensor[..., begin * per_step : end * per_step]
    return part


def scan_sequences(scan, inputs: dict, options: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Applies `scan` to packed sequences one by one; out is 0 outside of them."""
    cu_seqlens = options.pop("cu_seqlens", None)
    if cu_seqlens is None:
        return scan(**inputs, **options)
    bounds = cu_seqlens.tolist()
    outs, states = [torch.zeros_like(inputs["u"][..., : bounds[0]])], []
    for index, (begin, end) in enumerate(itertools.pairwise(bounds)):
        part = part_of(inputs, begin, end)
        if inputs["initial_state"] is not None:
            part["initial_state"] = inputs["initial_state"][index : index + 1]
        out, last_state = scan(**part, **options)
        outs.append(out)
        states.append(last_state)
    outs.append(torch.zeros_like(inputs["u"][..., bounds[-1] :]))
    return torch.cat(outs, -1), torch.cat(states)


def check(case: Case, device: str = "cpu", backend: str = "auto") -> None:
    """Runs a case and asserts that every output and gradient is as accurate as required."""
    check_results(case, run(case, device, backend), device, backend)


def check_results(
    case: Case, actual: dict, device: str = "cpu", backend: str = "auto", names=None
) -> None:
    """Asserts that results named as run() names them are accurate, or only those in `names`."""
    exact = reference(case)
    if names is not None:
        exact = {name: exact[name] for name in names}
    plain = functools.partial(plain_results, case.data)
    check_against(exact, plain, case, make(case).tensors, actual, device, backend)


def check_against(
    exact: dict, plain, case: Case, inputs: dict, actual: dict, device: str, backend: str = "auto"
) -> None:
    """Asserts that results match the exact ones, within a tolerance that is widened by the errors
    of `plain(count)`, the plain results of nudged inputs."""
    failures = []
    for name, expected in exact.items():
        value = actual[name]
        if expected is None or value is None:
            if not is_zero(expected) or not is_zero(value):
                failures.append(f"{name}: only one of {backend} and reference has it")
            continue
        source = inputs.get(name.removeprefix("d"))
        if source is not None and name.startswith("d") and value.dtype != source.dtype:
            failures.append(f"{name}: dtype {value.dtype}, expected {source.dtype}")
        tol = tolerance(name, value.dtype, case.is_double, device)
        reason = complaint(value, expected, tol)
        if reason:
            # If the result is of few numbers, four of them may all be accurate by chance.
            count = 12 if expected.numel() <= 4 else 4
            reason = complaint(value, expected, tol, [result[name] for result in plain(count)])
        if reason:
            failures.append(f"{name}: {reason}")
    if "out" in exact and actual["out"].dtype != case.dtype:
        failures.append(f"out: dtype {actual['out'].dtype}, expected {case.dtype}")
    assert not failures, f"{case} on {device}\n" + "\n".join(failures)


def check_repeatable(case: Case, device: str) -> dict[str, torch.Tensor]:
    """Asserts that runs agree bit by bit, and returns their results."""
    first = run(case, device)
    assert_same_bits(first, *(run(case, device) for _ in range(3)))
    return first


def is_zero(tensor: torch.Tensor | None) -> bool:
    return tensor is None or not tensor.any()
