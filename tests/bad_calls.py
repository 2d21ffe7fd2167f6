"""The table of bad calls: what is wrong, and the sentence that says so."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from problem import METHODS, TENSORS

BATCH, DIM, SEQLEN, DSTATE, GROUPS = 2, 4, 6, 3, 2


def good_call(is_complex=False):
    pole = torch.complex64 if is_complex else torch.float32
    return {
        "u": torch.randn(BATCH, DIM, SEQLEN),
        "delta": torch.rand(BATCH, DIM, SEQLEN),
        "A": -torch.rand(DIM, DSTATE, dtype=pole),
        "B": torch.randn(BATCH, GROUPS, DSTATE, SEQLEN, dtype=pole),
        "C": torch.randn(BATCH, GROUPS, DSTATE, SEQLEN, dtype=pole),
        "D": torch.randn(DIM),
        "z": torch.randn(BATCH, DIM, SEQLEN),
        "delta_bias": torch.rand(DIM),
        "initial_state": torch.randn(BATCH, DIM, DSTATE, dtype=pole),
        "delta_softplus": True,
        "discretization_method": "foh",
        "reverse": False,
        "cu_seqlens": None,
        "input_delta": torch.rand(BATCH, DIM, SEQLEN),
    }


@dataclass(frozen=True)
class Bad:
    """A call wrong in the arguments `changes` gives; "{u}" in the message is the device of u."""

    changes: dict[str, object]
    message: str
    error: type[Exception] = RuntimeError
    is_complex: bool = False
    python_only: bool = False  # what the ops cannot be given, or refuse in PyTorch's own words

    def __str__(self):
        return ",".join(self.changes) + ": " + self.message.split(" must be ")[-1]


@dataclass(frozen=True)
class Value:
    """A tensor that is made when the call is, so that it can be on any device."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    make: Callable = field(default=torch.ones)

    def on(self, device):
        return self.make(self.shape, dtype=self.dtype, device=device)


def wrong_types():
    needed = ("u", "delta", "A", "B", "C")
    optional = ("D", "z", "delta_bias", "initial_state", "input_delta")
    for name in needed:
        yield Bad({name: [1.0]}, f"{name} must be a Tensor, got list", TypeError)
        yield Bad({name: None}, f"{name} must be a Tensor, got NoneType", TypeError)
    for name in optional:
        yield Bad({name: 1.0}, f"{name} must be a Tensor or None, got float", TypeError)
    for name in ("delta_softplus", "reverse", "return_last_state"):
        yield Bad({name: 1}, f"{name} must be a bool, got int", TypeError)
        if name != "return_last_state":  # where None means no
            yield Bad({name: None}, f"{name} must be a bool, got NoneType", TypeError)
        yield Bad({name: Value(())}, f"{name} must be a bool, got Tensor", TypeError)
    for name in ("discretization_method", "backend"):
        yield Bad({name: 3}, f"{name} must be a str, got int", TypeError)
        yield Bad({name: None}, f"{name} must be a str, got NoneType", TypeError)
    yield Bad(
        {"backend": "tpu"},
        "backend must be one of auto, cpu, cuda, reference, got 'tpu'",
        ValueError,
    )


def wrong_methods():
    for method in ("euler", "ZOH", "", "zoh "):
        yield Bad(
            {"discretization_method": method},
            f"discretization_method must be one of {', '.join(METHODS)}, got '{method}'",
        )


REAL = "float32, float16, bfloat16 or float64"


def wrong_dtypes():
    good = {name: tuple(value.shape) for name, value in good_call().items() if name in TENSORS}
    for name in ("u", "delta", "z", "input_delta", "D", "delta_bias", "B", "C"):
        for dtype in (torch.int64, torch.bool, torch.complex64, torch.uint8):
            text = str(dtype).removeprefix("torch.")
            yield Bad(
                {name: Value(good[name], dtype)}, f"{name} must have dtype {REAL}, got {text}"
            )
    for dtype in (torch.float16, torch.bfloat16, torch.int32):
        text = str(dtype).removeprefix("torch.")
        yield Bad(
            {"A": Value(good["A"], dtype)},
            f"A must have dtype float32, float64, complex64 or complex128, got {text}",
        )
    state = good["initial_state"]
    for dtype in (torch.float16, torch.complex64):
        text = str(dtype).removeprefix("torch.")
        yield Bad(
            {"initial_state": Value(state, dtype)},
            f"initial_state must have dtype float32 or float64, got {text}",
        )
    yield Bad(
        {"initial_state": Value(state)},
        "initial_state must have dtype complex64 or complex128, got float32",
        is_complex=True,
    )
    for name in ("B", "C"):
        yield Bad(
            {name: Value((DIM, DSTATE))},
            f"{name} must have dtype complex64 or complex128 (complex A, constant B and C), "
            "got float32",
            is_complex=True,
        )
        yield Bad(
            {name: Value(good[name], torch.int64)},
            f"{name} must have dtype complex64, complex128, float32, float16, bfloat16 or float64, "
            "got int64",
            is_complex=True,
        )
    for name in ("u", "delta", "z", "input_delta"):
        yield Bad(
            {name: Value(good[name], torch.complex64)},
            f"{name} must have dtype {REAL}, got complex64",
            is_complex=True,
        )


def wrong_shapes():
    b, d, n, s, g = BATCH, DIM, DSTATE, SEQLEN, GROUPS
    for shape in ((b, s), (b, d, s, 1), (), (s,)):
        yield Bad({"u": Value(shape)}, f"u must be (batch, dim, seqlen), got {shape}")
    for name in ("delta", "z", "input_delta"):
        for shape in ((b, d, s - 1), (b, d + 1, s), (b + 1, d, s), (b, s, d), (d, s), (1, d, s)):
            yield Bad(
                {name: Value(shape)},
                f"{name} must be (batch, dim, seqlen) = ({b}, {d}, {s}), got {shape}",
            )
    for shape in ((d - 1, n), (n, d), (d,), (n,), (d, n, 1, 1), (1, n), ()):
        yield Bad({"A": Value(shape)}, f"A must be (dim, dstate) = ({d}, *), got {shape}")
    for shape in ((d, n, n), (d, n, 1)):
        yield Bad(
            {"A": Value(shape)},
            f"A of shape {shape} needs discretization_method bilinear, got 'foh'",
        )
    yield Bad({"A": Value((d, 0))}, f"A must have dstate of at least 1, got ({d}, 0)")
    for name in ("B", "C"):
        for shape in ((), (n,), (b, g, n, s, 1)):
            yield Bad(
                {name: Value(shape)},
                f"{name} must be (dim, dstate), (batch, dstate, seqlen) or "
                f"(batch, groups, dstate, seqlen), got {shape}",
            )
        for shape in ((d, n + 1), (d - 1, n), (n, d), (n, s)):
            yield Bad(
                {name: Value(shape)}, f"{name} must be (dim, dstate) = ({d}, {n}), got {shape}"
            )
        for shape in ((b, n, s - 1), (b, n + 1, s), (1, n, s), (b, s, n), (b, n, 2 * s)):
            yield Bad(
                {name: Value(shape)},
                f"{name} must be (batch, dstate, seqlen) = ({b}, {n}, {s}), got {shape}",
            )
        for shape in ((b, g, n, s + 1), (b, g, n - 1, s), (1, g, n, s), (b, g, s, n)):
            yield Bad(
                {name: Value(shape)},
                f"{name} must be (batch, groups, dstate, seqlen) = ({b}, *, {n}, {s}), got {shape}",
            )
        for groups in (0, 3, 5, 8):
            yield Bad(
                {name: Value((b, groups, n, s))},
                f"{name} must have a number of groups that divides dim = {d}, got {groups}",
            )
        for shape, names, sizes in (
            ((b, n, s), "batch, dstate, 2*seqlen", f"{b}, {n}, {2 * s}"),
            ((b, n, 2 * s + 1), "batch, dstate, 2*seqlen", f"{b}, {n}, {2 * s}"),
            ((b, g, n, s), "batch, groups, dstate, 2*seqlen", f"{b}, *, {n}, {2 * s}"),
        ):
            yield Bad(
                {name: Value(shape)},
                f"{name} must be ({names}) = ({sizes}), got {shape}",
                is_complex=True,
            )
        yield Bad(
            {name: Value((b, g, n, 2 * s), torch.complex64)},
            f"{name} must be (batch, groups, dstate, seqlen) = ({b}, *, {n}, {s}), "
            f"got {(b, g, n, 2 * s)}",
            is_complex=True,
        )
    yield Bad({"C": Value((b, 4, n, s))}, "C must have as many groups as B, 2, got 4")
    yield Bad({"C": Value((b, n, s))}, "C must have as many groups as B, 2, got 1")
    for name in ("D", "delta_bias"):
        for shape in ((d - 1,), (d, 1), (), (1,), (1, d)):
            yield Bad({name: Value(shape)}, f"{name} must be (dim,) = ({d},), got {shape}")
    for shape in ((b, d, n + 1), (b, n, d), (d, n), (1, d, n), (b, d, n, 1)):
        yield Bad(
            {"initial_state": Value(shape)},
            f"initial_state must be (sequences, dim, dstate) = ({b}, {d}, {n}), got {shape}",
        )


def wrong_sequences():
    d, n, s = DIM, DSTATE, SEQLEN
    packed = {name: Value((1, d, s)) for name in ("u", "delta", "z", "input_delta")}
    packed |= {name: Value((1, GROUPS, n, s)) for name in ("B", "C")}
    bounds = Value((4,), torch.int32, torch.zeros)
    yield Bad({"cu_seqlens": [0, 6]}, "cu_seqlens must be a Tensor or None, got list", TypeError)
    yield Bad({"cu_seqlens": Value((3,))}, "cu_seqlens must have dtype int32 or int64, got float32")
    for shape in ((1, 2), ()):
        yield Bad(
            {**packed, "initial_state": None, "cu_seqlens": Value(shape, torch.int64)},
            f"cu_seqlens must be (sequences+1,), got {shape}",
        )
    yield Bad(
        {**packed, "cu_seqlens": Value((0,), torch.int64)},
        "cu_seqlens must have sequences+1 of at least 1, got (0,)",
    )
    yield Bad(
        {"cu_seqlens": bounds},
        f"u must have batch of 1 where cu_seqlens is given, got ({BATCH}, {d}, {s})",
    )
    yield Bad(
        {**packed, "cu_seqlens": bounds},
        f"initial_state must be (sequences, dim, dstate) = (3, {d}, {n}), got ({BATCH}, {d}, {n})",
    )
    yield Bad(
        {"cu_seqlens": Value((3,), torch.int32, on_meta)},
        "cu_seqlens must be on the device of u, {u}, got meta",
    )


def to_csr(shape, dtype, device):
    return torch.ones(shape, dtype=dtype, device=device).to_sparse_csr()


def to_coo(shape, dtype, device):
    return torch.ones(shape, dtype=dtype, device=device).to_sparse_coo()


def on_meta(shape, dtype, device):
    return torch.ones(shape, dtype=dtype, device="meta")


def wrong_places():
    for name, value in good_call().items():
        if name not in TENSORS:
            continue
        shape = tuple(value.shape)
        yield Bad(
            {name: Value(shape, make=to_coo)},
            f"{name} must be a dense (strided) tensor, got layout sparse_coo",
            python_only=True,
        )
        if len(shape) == 2:
            yield Bad(
                {name: Value(shape, make=to_csr)},
                f"{name} must be a dense (strided) tensor, got layout sparse_csr",
                python_only=True,
            )
        if name != "u":
            yield Bad(
                {name: Value(shape, make=on_meta)},
                f"{name} must be on the device of u, {{u}}, got meta",
            )


def wrong_in_order():
    """Where several things are wrong, what is checked first is said first."""
    b, d, s = BATCH, DIM, SEQLEN
    wide = Value((b, d, s + 1))
    yield Bad(
        {"delta": wide, "z": Value((b, d, s), torch.int32)},
        f"z must have dtype {REAL}, got int32",
    )
    yield Bad(
        {"z": wide, "delta": wide},
        f"delta must be (batch, dim, seqlen) = ({b}, {d}, {s}), got {wide.shape}",
    )
    yield Bad(
        {"u": Value((b, d, s), torch.int32), "discretization_method": "tustin"},
        f"discretization_method must be one of {', '.join(METHODS)}, got 'tustin'",
    )


BAD_CALLS = [
    *wrong_types(),
    *wrong_methods(),
    *wrong_dtypes(),
    *wrong_shapes(),
    *wrong_sequences(),
    *wrong_places(),
    *wrong_in_order(),
]


def arguments_of(bad, device):
    arguments = good_call(bad.is_complex) | bad.changes
    arguments = {
        name: value.on(device) if isinstance(value, Value) else value
        for name, value in arguments.items()
    }
    return {
        name: value.to(device) if name not in bad.changes and name in TENSORS else value
        for name, value in arguments.items()
    }
