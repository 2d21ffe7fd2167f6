"""GPU architectures, and the CUDA toolkit that compiles for them, for setup.py.

If something cannot be built, these functions raise a ValueError whose text is for the user.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import ModuleType

MINIMUM_NVCC = 12  # the first with C++20
MINIMUM_ARCHITECTURE = (7, 5)
# 8.9 runs the code of 8.6, and nothing here would use its further features.
ALL_ARCHITECTURES = ("7.5", "8.0", "8.6", "9.0", "10.0", "12.0")
# GPUs that run another architecture's code: nvcc 13 reportedly miscompiles for sm_103.
SERVED_BY = {(10, 3): (10, 0)}
# The names that PyTorch gives to groups of architectures.
NAMED_ARCHITECTURES = {
    "volta": ("7.0+PTX",),
    "volta+tegra": ("7.2",),
    "turing": ("7.5+PTX",),
    "ampere": ("8.0", "8.6+PTX"),
    "ampere+tegra": ("8.7",),
    "ada": ("8.9+PTX",),
    "hopper": ("9.0+PTX",),
    "blackwell": ("10.0", "10.3", "12.0", "12.1+PTX"),
    "blackwell+tegra": ("11.0",),
}


# --- architectures --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Architecture:
    """A compute capability such as 9.0 or 9.0a: its code, PTX for later GPUs, or both."""

    major: int
    minor: int
    suffix: str = ""
    ptx: bool = False
    code: bool = True

    @classmethod
    def parse(cls, text: str) -> Architecture:
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX|-virtual)?", text, re.IGNORECASE)
        if match is None:
            names = ", ".join(name.title() for name in NAMED_ARCHITECTURES)
            raise ValueError(
                "TORCH_CUDA_ARCH_LIST must be all, native or hold entries such as 9.0, 9.0a, "
                f"9.0+PTX, 9.0-virtual or {names}, got {text!r}"
            )
        major, minor, suffix, kind = match.groups()
        has_code = kind is None or kind.startswith("+")
        return cls(int(major), int(minor), suffix.lower(), kind is not None, has_code)

    @property
    def capability(self) -> tuple[int, int]:
        return self.major, self.minor

    @property
    def number(self) -> str:
        """The number in nvcc's notation, such as 90a."""
        return f"{self.major}{self.minor}{self.suffix}"

    def __str__(self) -> str:
        kind = "" if not self.ptx else "+PTX" if self.code else "-virtual"
        return f"{self.major}.{self.minor}{self.suffix}{kind}"

    def nvcc_flags(self) -> list[str]:
        wanted = [("sm", self.code), ("compute", self.ptx)]
        return [
            f"-gencode=arch=compute_{self.number},code={kind}_{self.number}"
            for kind, is_wanted in wanted
            if is_wanted
        ]


def merged(architectures: Iterable[Architecture]) -> list[Architecture]:
    """Merges entries of the same architecture, in order; replaces those that others serve."""
    chosen: dict[str, Architecture] = {}
    for architecture in architectures:
        if server := SERVED_BY.get(architecture.capability):
            architecture = replace(architecture, major=server[0], minor=server[1], suffix="")
        known = chosen.get(architecture.number, architecture)
        chosen[architecture.number] = replace(
            known, ptx=known.ptx or architecture.ptx, code=known.code or architecture.code
        )
    return sorted(chosen.values(), key=lambda a: (a.major, a.minor, a.suffix))


def parse_architectures(text: str) -> list[Architecture]:
    """Parses a TORCH_CUDA_ARCH_LIST; a ValueError says what is wrong with it."""
    entries = re.split(r"[;,\s]+", text.strip(";, \t\n"))
    items = (item for entry in entries for item in NAMED_ARCHITECTURES.get(entry.lower(), (entry,)))
    return merged(map(Architecture.parse, items))


def visible_capabilities(torch: ModuleType) -> list[tuple[int, int]]:
    """Returns the compute capabilities of the visible GPUs, from torch or the driver."""
    if torch.version.cuda is not None:
        count = torch.cuda.device_count()
        return [torch.cuda.get_device_capability(index) for index in range(count)]
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    found = re.findall(r"^(\d+)\.(\d+)$", answer.stdout, re.MULTILINE)
    return [(int(major), int(minor)) for major, minor in found]


def with_ptx(architectures: list[Architecture]) -> list[Architecture]:
    """Returns the architectures, the last one with PTX for later GPUs."""
    return [*architectures[:-1], replace(architectures[-1], ptx=True)]


def all_architectures(supported: set[str]) -> list[Architecture]:
    known = [Architecture.parse(text) for text in ALL_ARCHITECTURES]
    known = [architecture for architecture in known if architecture.number in supported]
    if not known:
        raise ValueError(f"nvcc supports none of {', '.join(ALL_ARCHITECTURES)}")
    return with_ptx(known)


def choose_architectures(
    text: str, supported: set[str], visible: list[tuple[int, int]]
) -> list[Architecture]:
    """Returns the architectures to compile for.

    Args:
        text: the value of TORCH_CUDA_ARCH_LIST.
        supported: the architectures that nvcc supports, such as {"80", "90"}.
        visible: the compute capabilities of the visible GPUs.
    """
    word = text.strip().lower()
    if word == "native" and not visible:
        raise ValueError("TORCH_CUDA_ARCH_LIST=native needs a GPU on the machine that builds")
    if word == "":
        present = merged(Architecture(*capability) for capability in visible)
        # GPUs that are too old are left out. If one is too new for nvcc, the PTX of the last
        # architecture serves it.
        fit = [a for a in present if a.capability >= MINIMUM_ARCHITECTURE]
        if fit and all(a.number in supported for a in fit):
            return with_ptx(fit)
    if word in ("", "all"):
        return all_architectures(supported)
    if word == "native":
        text = ";".join(f"{major}.{minor}" for major, minor in visible)
    architectures = parse_architectures(text)
    for architecture in architectures:
        if architecture.capability < MINIMUM_ARCHITECTURE:
            major, minor = MINIMUM_ARCHITECTURE
            raise ValueError(
                f"TORCH_CUDA_ARCH_LIST asks for {architecture}; the kernels need "
                f"{major}.{minor} or later"
            )
        if f"{architecture.major}{architecture.minor}" not in supported:
            raise ValueError(
                f"TORCH_CUDA_ARCH_LIST asks for {architecture}, which this nvcc does not support"
            )
    return architectures


# --- toolkit --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit as nvcc itself describes it.

    nvcc on PATH may be a link or a wrapper script, so nothing is derived from its location.
    """

    nvcc: str
    home: str
    version: tuple[int, int]
    include_dirs: list[str]
    library_dirs: list[str]
    supported: set[str]

    @classmethod
    def ask(cls, nvcc: str) -> Toolkit:
        def run(*arguments: str) -> str:
            result = subprocess.run([nvcc, *arguments], capture_output=True, text=True, check=False)
            return result.stdout + result.stderr

        plan = run("--dryrun", "-E", "-x", "cu", os.devnull)
        release = re.search(r"release (\d+)\.(\d+)", run("--version"))
        top = re.search(r"^#\$ TOP=(.*)$", plan, re.MULTILINE)
        if release is None or top is None:
            raise ValueError(
                f"{nvcc} does not answer as nvcc does; set CUDA_HOME to a working CUDA toolkit"
            )
        home = os.path.realpath(top[1].strip())
        if shutil.which("nvcc", path=os.path.join(home, "bin")) is None:
            home = os.path.dirname(os.path.dirname(nvcc))

        def folders(variable: str, flag: str) -> list[str]:
            line = re.search(rf"^#\$ {variable}=(.*)$", plan, re.MULTILINE)
            found = re.findall(rf'"{flag}([^"]+)"', line[1]) if line else []
            return [os.path.realpath(folder) for folder in found if os.path.isdir(folder)]

        return cls(
            nvcc=nvcc,
            home=home,
            version=(int(release[1]), int(release[2])),
            include_dirs=folders("INCLUDES", "-I"),
            library_dirs=folders("LIBRARIES", "(?:-L|/LIBPATH:)"),
            supported=set(re.findall(r"sm_(\d+)", run("--list-gpu-code"))),
        )


def find_nvcc() -> str | None:
    """Returns the path of nvcc from CUDA_HOME, PATH or the usual places, or None."""
    folders = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    for folder in folders:
        if folder and (nvcc := shutil.which("nvcc", path=os.path.join(folder, "bin"))):
            return nvcc
    if nvcc := shutil.which("nvcc"):
        return nvcc
    if os.name == "nt":
        usual = [r"C:\Program Files\NVIDIA GPU Computing Toolkit\CUDA\v*"]
    else:
        usual = ["/usr/local/cuda", "/opt/cuda", "/usr/local/cuda-*"]
    for pattern in usual:
        for folder in sorted(glob.glob(pattern), reverse=True):
            if nvcc := shutil.which("nvcc", path=os.path.join(folder, "bin")):
                return nvcc
    return None


def find_toolkit(torch: ModuleType, major: int | None = None) -> Toolkit:
    """Returns the toolkit that builds for this PyTorch, or for a major version of CUDA."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise ValueError("nvcc was not found by CUDA_HOME, on PATH or in the usual places")
    toolkit = Toolkit.ask(nvcc)
    release = ".".join(map(str, toolkit.version))
    if toolkit.version[0] < MINIMUM_NVCC:
        raise ValueError(f"{nvcc} is of CUDA {release}, and C++20 needs {MINIMUM_NVCC}.0 or later")
    if major is not None:
        wanted = f"this wheel is for CUDA {major}"
    elif torch.version.cuda:
        major = int(torch.version.cuda.split(".")[0])
        wanted = f"torch {torch.__version__} of CUDA {torch.version.cuda}"
    if major not in (None, toolkit.version[0]):
        raise ValueError(
            f"{nvcc} is of CUDA {release}, but {wanted}; set CUDA_HOME to a toolkit of that major "
            "version"
        )
    return toolkit
