"""Calls as the plans of csrc/cuda/plan see them, and the plans for them. No GPU is needed."""

from dataclasses import asdict, dataclass
from types import ModuleType

import core_build
from problem import METHODS

PLAN_SOURCES = sorted(
    path.relative_to(core_build.CSRC).as_posix()
    for path in (core_build.CSRC / "cuda/plan").glob("*.cpp")
)


@dataclass(frozen=True)
class Call:
    """The sizes and layout of a call, as in plan_bindings.cpp."""

    batch: int
    dim: int
    seqlen: int
    dstate: int
    groups: int = 1
    method: str = "zoh"
    dtype: str = "bfloat16"
    projection_dtype: str = ""  # of B and C; if empty, dtype
    complex: bool = False
    B: str = "variable"  # or constant
    C: str = "variable"
    channel_last: bool = False
    reverse: bool = False
    mixed: bool = False
    z: bool = True
    padding: int = 0
    wider_rows: bool = False
    turned: tuple[str, ...] = ()
    packed: bool = False
    input_delta: bool = False
    state_alone: bool = False
    map_alone: bool = False


@dataclass(frozen=True)
class Device:
    multiprocessors: int
    block_shared_bytes: int
    shared_bytes: int
    major: int


H200 = Device(132, 232448, 233472, 9)
A100 = Device(108, 166912, 167936, 8)
RTX3090 = Device(82, 101376, 102400, 8)
T4 = Device(40, 65536, 65536, 7)


HALF = Call(8, 1024, 1024, 16, dtype="float16", projection_dtype="float16")
CONSTANT = {"B": "constant", "C": "constant", "dtype": "float32"}


def load_bindings(folder):
    return core_build.load(folder, "plan_bindings", ("core", "cuda"), (), PLAN_SOURCES)


def fill(target, values):
    for name, value in asdict(values).items():
        setattr(target, name, value)
    return target


@dataclass(frozen=True)
class Planner:
    """Plans calls: planner("forward" or "backward", call, device=H200, wanted=None) returns the
    plan as a dict or, with slices=True, how the call is arranged in slices or copies."""

    bindings: ModuleType

    def __call__(self, which, call, device=H200, wanted=None, slices=False):
        call, device = fill(self.bindings.Call(), call), fill(self.bindings.Device(), device)
        if slices:
            return getattr(self.bindings, f"{which}_slices")(call, device)
        return getattr(self.bindings, f"plan_{which}")(call, device, wanted)


def random_call(generator):
    """Returns a call of random sizes and layout; common values are drawn often."""
    choose = generator.choice
    batch = choose([1, 1, 2, 3, 8, 64, 1000])
    groups = choose([1, 1, 1, 2, 3])
    is_complex = generator.random() < 0.2
    return Call(
        batch=batch,
        dim=groups * choose([1, 2, 16, 96, 256, 768, 1536, generator.randint(1, 700)]),
        seqlen=choose([1, 7, 64, 200, 784, 2048, 65536, 1 << 20, generator.randint(1, 5000)]),
        dstate=choose([1, 2, 4, 8, 16, 16, 16, 32, 64, generator.randint(1, 256)]),
        groups=groups,
        method=choose(["zoh", "zoh", *METHODS]),
        dtype=choose(["float32", "bfloat16", "float16", "float64"]),
        projection_dtype=choose(["", "", "", "float16"]),
        complex=is_complex,
        B=choose(["variable"] * 4 + ["constant"]),
        C=choose(["variable"] * 4 + ["constant"]),
        channel_last=generator.random() < 0.3,
        reverse=generator.random() < 0.2,
        mixed=generator.random() < 0.1,
        z=generator.random() < 0.7,
        padding=choose([0, 0, 1, 8, 64]),
        wider_rows=generator.random() < 0.2,
        packed=batch == 1 and generator.random() < 0.3,
    )
