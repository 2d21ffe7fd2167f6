"""Builds the libraries of selective_scan: `_cpu.so` always, `_cuda.so` where nvcc is found and
torch is a CUDA build.

Environment variables:
    USE_CUDA=0|1                leave the CUDA library out, or build it in any case
    CUDA_HOME                   where to look for nvcc first (then PATH, then the usual places)
    TORCH_CUDA_ARCH_LIST        GPU architectures: "Ampere;Hopper", "9.0+PTX", "9.0a", "native",
                                "all", "9.0-virtual" for PTX alone; unset, those of the GPUs that
                                are there, else all
    SELECTIVE_SCAN_METHODS      "zoh,foh" builds these discretization methods alone, in less time
    SELECTIVE_SCAN_NVCC_FLAGS   more flags of nvcc, such as "-Xptxas -O0"
    MAX_JOBS                    how many files are compiled at a time
    SELECTIVE_SCAN_WHEEL        cpu, cu12 or cu13: what a release's wheel holds; it is a part of the
                                version, as in 0.1.0+cu13 (tools/build_wheel.sh sets it)
    DEBUG=1                     line information, no optimisation, assertions on host and device
    SELECTIVE_SCAN_SANITIZE=1   the CPU library alone, with AddressSanitizer and UBSan
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import setuptools

ROOT = Path(__file__).resolve().parent

MINIMUM_TORCH = (2, 10)
MINIMUM_SETUPTOOLS = 77
# The stable ABI's functions that this library may use: those of PyTorch 2.10.
TORCH_TARGET_FLAG = "-DTORCH_TARGET_VERSION=0x020a000000000000"

# The wheels of a release, and the major version of CUDA that each is for.
RELEASE_WHEELS = {"cpu": None, "cu12": 12, "cu13": 13}
# What compiling all methods takes of one core: the CPU library, and the CUDA one for each GPU
# architecture. docs/contributing.md has what a release took.
CPU_MINUTES = 6
CUDA_MINUTES = 14


def stop(sentence: str) -> NoReturn:
    """Ends the build with one sentence instead of a traceback."""
    sys.exit(f"selective_scan: {sentence}")


def environment_flag(name: str) -> bool | None:
    """The value of an on/off variable, None when it is unset or empty."""
    value = os.environ.get(name, "").strip().lower()
    if value in ("1", "on", "true", "yes"):
        return True
    if value in ("0", "off", "false", "no"):
        return False
    if value:
        stop(f"{name} must be 0 or 1, got {os.environ[name]!r}")
    return None


@dataclass(frozen=True)
class ReleaseWheel:
    """One of the wheels of a release: for CPUs alone, or for the GPUs of a CUDA version too."""

    name: str
    cuda: int | None

    @classmethod
    def asked_for(cls) -> ReleaseWheel | None:
        name = os.environ.get("SELECTIVE_SCAN_WHEEL", "").strip()
        if not name:
            return None
        if name not in RELEASE_WHEELS:
            stop(f"SELECTIVE_SCAN_WHEEL must be {', '.join(RELEASE_WHEELS)} or unset, got {name!r}")
        return cls(name, RELEASE_WHEELS[name])


def load_module(path: Path) -> ModuleType:
    """A module by its file, since the source tree is not where Python looks for modules."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses look up the types of their fields
    spec.loader.exec_module(module)
    return module


instantiations = load_module(ROOT / "csrc" / "cuda" / "instantiations.py")
argument_tables = load_module(ROOT / "csrc" / "torch" / "argument_tables.py")
cuda = load_module(ROOT / "csrc" / "cuda" / "toolkit.py")


def chosen_methods() -> list[str]:
    """The discretization methods to build: those of SELECTIVE_SCAN_METHODS, all where it is unset
    or empty."""
    text = os.environ.get("SELECTIVE_SCAN_METHODS", "")
    names = re.findall(r"[^\s,;]+", text.lower())
    known = instantiations.method_names()
    if not set(names) <= set(known):
        stop(f"SELECTIVE_SCAN_METHODS must be some of {', '.join(known)}, got {text!r}")
    return [name for name in known if name in names or not names]


def method_flags(methods: list[str]) -> list[str]:
    """Tells the C++ sources which methods are built, where not all of them are."""
    known = instantiations.method_names()
    if methods == known:
        return []
    bits = sum(1 << known.index(name) for name in methods)
    return [f"{'/D' if os.name == 'nt' else '-D'}SELECTIVE_SCAN_METHOD_BITS={bits}u"]


# --- what to build of the CUDA library ------------------------------------------------------------


@dataclass(frozen=True)
class CudaPlan:
    """What to build of the CUDA library: all of it, or nothing and why."""

    toolkit: cuda.Toolkit | None = None
    architectures: tuple[cuda.Architecture, ...] = ()
    reason: str = ""


def plan_cuda(
    torch: ModuleType, use_cuda: bool | None, sanitize: bool, major: int | None = None
) -> CudaPlan:
    """Decides about the CUDA library; whether there is a GPU has a say in the architectures alone,
    since machines that build often have none. `major` is of CUDA, of torch's where it is None."""
    if sanitize:
        return CudaPlan(reason="a sanitizer build has the CPU library alone")
    if use_cuda is False:
        return CudaPlan(reason="USE_CUDA=0")
    if use_cuda is None and torch.version.cuda is None:
        return CudaPlan(
            reason=f"torch {torch.__version__} is not a CUDA build (USE_CUDA=1 builds it anyway)"
        )
    try:
        toolkit = cuda.find_toolkit(torch, major)
    except ValueError as problem:
        if use_cuda:
            stop(f"USE_CUDA=1 asks for the CUDA library, but {problem}.")
        return CudaPlan(reason=str(problem))
    try:
        wanted = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
        visible = cuda.visible_capabilities(torch)
        architectures = cuda.choose_architectures(wanted, toolkit.supported, visible)
    except ValueError as error:
        stop(f"{error}.")
    return CudaPlan(toolkit, tuple(architectures))


# --- sources and flags ----------------------------------------------------------------------------


def sources(*patterns: str) -> list[str]:
    """The sources of a library, relative to the root as setuptools wants them."""
    found = {path for pattern in patterns for path in ROOT.glob(pattern)}
    relative = sorted(path.relative_to(ROOT) for path in found)
    stems = [path.with_suffix("") for path in relative]
    for stem in stems:
        if stems.count(stem) > 1:  # NAME.cpp and NAME.cu would be compiled into one NAME.o
            raise ValueError(f"two sources share the object file name {stem}")
    return [path.as_posix() for path in relative]


def dispatch_sources(backend: str) -> list[str]:
    """Those of csrc/torch for one library: a file belongs to one backend by its name, to both
    else, since the libraries show each other no symbols."""
    other = {"cpu": "_cuda.cpp", "cuda": "_cpu.cpp"}[backend]
    return [path for path in sources("csrc/torch/*.cpp") if not path.endswith(other)]


def cpu_sources() -> list[str]:
    return [*sources("csrc/cpu/**/*.cpp"), *dispatch_sources("cpu")]


def cuda_sources() -> list[str]:
    """Those of the source tree; the instantiations are written as they are built."""
    return [*sources("csrc/cuda/**/*.cu", "csrc/cuda/**/*.cpp"), *dispatch_sources("cuda")]


def headers() -> list[Path]:
    return [path for suffix in ("h", "cuh") for path in ROOT.glob(f"csrc/**/*.{suffix}")]


def cxx_flags(includes: list[str], debug: bool, sanitize: bool, level: str = "-O3") -> list[str]:
    if os.name == "nt":
        flags = ["/std:c++20", "/permissive-", "/Zc:__cplusplus", "/EHsc", "/W3", "/wd4190"]
        flags += ["/Od", "/Z7", "/UNDEBUG"] if debug else ["/O2", "/DNDEBUG"]
        flags += ["/external:W0", *(f"/external:I{folder}" for folder in includes)]
        return flags
    flags = ["-std=c++20", "-fvisibility=hidden", "-Wall", "-Wextra"]
    # A system include: warnings of PyTorch's own headers are not ours to mend.
    flags += [part for folder in includes for part in ("-isystem", folder)]
    if sanitize:
        flags += ["-O1", "-g", "-UNDEBUG", "-fno-omit-frame-pointer", *sanitizer_flags()]
    elif debug:
        flags += ["-O0", "-g", "-UNDEBUG", "-D_GLIBCXX_ASSERTIONS"]
    else:
        flags += [level, "-g0", "-DNDEBUG"]
    return flags


def sanitizer_flags() -> list[str]:
    return ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


def nvcc_flags(plan: CudaPlan, debug: bool) -> list[str]:
    """Flags of the kernels; they know no tensors, so PyTorch's headers are not on their path."""
    flags = ["-std=c++20", "--expt-relaxed-constexpr"]
    # The smaller format needs a driver that CUDA 13 asks for anyway, and CUDA 12 does not.
    is_13 = plan.toolkit is not None and plan.toolkit.version >= (13, 0)
    flags.append("--compress-mode=size" if is_13 else "-Xfatbin=-compress-all")
    # BuildExtension switches the operators of __half and __nv_bfloat16 off, for the sake of ATen.
    for macro in ("HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_CONVERSIONS", "HALF2_OPERATORS"):
        flags.append(f"-U__CUDA_NO_{macro}__")
    # -G: device code without optimisation and with line information.
    flags += ["-O0", "-g", "-G", "-UNDEBUG"] if debug else ["-O3", "-DNDEBUG"]
    if os.name != "nt":
        flags += ["-Xcompiler=-fvisibility=hidden,-Wall,-Wextra"]
    for architecture in plan.architectures:
        flags += architecture.nvcc_flags()
    return [*flags, *os.environ.get("SELECTIVE_SCAN_NVCC_FLAGS", "").split()]


def link_flags(torch_libraries: list[str], debug: bool, sanitize: bool) -> list[str]:
    if os.name == "nt":
        folders = [f"/LIBPATH:{folder}" for folder in torch_libraries]
        return [*folders, "torch.lib", "torch_cpu.lib", "c10.lib"]
    folders = [f"-L{folder}" for folder in torch_libraries]
    if sys.platform == "darwin":
        return [*folders, "-ltorch", "-ltorch_cpu", "-lc10"]
    # NEEDED libtorch.so is what makes PyTorch's symbols visible to this library, since Python loads
    # PyTorch's own libraries with local visibility; a linker told --as-needed would drop it.
    flags = [*folders, "-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed"]
    flags.append(f"-Wl,--version-script={ROOT / 'csrc' / 'torch' / 'exports.map'}")
    if sanitize:
        return flags + sanitizer_flags()
    # Names of what is not exported, a tenth of the libraries' size, serve debuggers alone.
    return flags if debug else [*flags, "-Wl,--strip-all"]


def cudart_flags(toolkit: cuda.Toolkit) -> list[str]:
    """The static CUDA runtime, so that one build serves torch builds of several CUDA versions."""
    if os.name == "nt":
        return [*(f"/LIBPATH:{folder}" for folder in toolkit.library_dirs), "cudart_static.lib"]
    folders = [f"-L{folder}" for folder in toolkit.library_dirs]
    hide = "-Wl,--exclude-libs,ALL"
    return [*folders, hide, "-lcudart_static", "-ldl", "-lrt", "-lpthread"]


def define_string(name: str, value: str) -> str:
    return f'{"/D" if os.name == "nt" else "-D"}{name}="{value}"'


def make_extension(name: str, files: list[str], cxx: list[str], nvcc: list[str], link: list[str]):
    return setuptools.Extension(
        f"selective_scan.{name}",
        files,
        include_dirs=[str(ROOT / "csrc")],
        depends=[path.relative_to(ROOT).as_posix() for path in headers()],
        extra_compile_args={"cxx": [TORCH_TARGET_FLAG, *cxx], "nvcc": nvcc},
        extra_link_args=link,
        language="c++",  # else an extension of .cu files is linked by the C compiler
    )


def make_extensions(plan: CudaPlan, debug: bool, sanitize: bool) -> list[setuptools.Extension]:
    from torch.utils import cpp_extension

    torch_includes = cpp_extension.include_paths()
    link = link_flags(cpp_extension.library_paths(), debug, sanitize)
    methods = method_flags(chosen_methods())
    cxx = [*cxx_flags(torch_includes, debug, sanitize), *methods]
    extensions = [make_extension("_cpu", cpu_sources(), cxx, [], link)]
    if plan.toolkit is not None:
        files = cuda_sources()
        names = ";".join(map(str, plan.architectures))
        includes = [*torch_includes, *plan.toolkit.include_dirs]
        cuda_cxx = [
            # What merely prepares launches -O3 would make longer, and no faster.
            *cxx_flags(includes, debug, sanitize, "-O2"),
            *methods,
            "-DUSE_CUDA",
            define_string("SELECTIVE_SCAN_CUDA_ARCHITECTURES", names),
        ]
        nvcc = [*nvcc_flags(plan, debug), *methods]
        link = [*link, *cudart_flags(plan.toolkit)]
        extensions.append(make_extension("_cuda", files, cuda_cxx, nvcc, link))
        cpp_extension.CUDA_HOME = plan.toolkit.home  # None where torch is a CPU build
    return extensions


# --- what is said before it is compiled -----------------------------------------------------------


def wheel_for(plan: CudaPlan) -> str | None:
    """The wheel of a release that serves the GPUs a plan builds for, by their code or by PTX."""
    if plan.toolkit is None:
        return None
    compiled = [cuda.Architecture.parse(text) for text in cuda.ALL_ARCHITECTURES]
    is_served = all(
        any(a.major == c.major and a.minor >= c.minor for c in compiled) for a in plan.architectures
    )
    of_cuda = (name for name, major in RELEASE_WHEELS.items() if major == plan.toolkit.version[0])
    return next(of_cuda, None) if is_served else None


def work_text(plan: CudaPlan, methods: list[str]) -> str:
    """How much there is to compile, and about how long that takes."""
    known = instantiations.method_names()
    files, minutes = len(cpu_sources()), CPU_MINUTES * len(methods) / len(known)
    if plan.toolkit is not None:
        all_kernels, kernels = (
            len({source.file(name) for source in instantiations.SOURCES for name in names})
            for names in (known, methods)
        )
        files += len(cuda_sources()) + kernels
        targets = sum(a.code + a.ptx for a in plan.architectures)
        minutes += CUDA_MINUTES * targets * kernels / all_kernels
    jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
    if not jobs.isdigit():
        stop(f"MAX_JOBS must be a number of files, got {jobs!r}")
    return (
        f"{files} sources, about {max(1, round(minutes))} minutes of one core, "
        f"{jobs} at a time (MAX_JOBS)"
    )


# --- setuptools commands --------------------------------------------------------------------------


def make_build_ext(torch: ModuleType, plan: CudaPlan, debug: bool, sanitize: bool):
    from torch.utils.cpp_extension import BuildExtension

    class BuildLibraries(BuildExtension):
        def __init__(self, *args, **kwargs) -> None:
            # The ninja path of BuildExtension does not quote string macros for Windows.
            kwargs.update(no_python_abi_suffix=True, use_ninja=os.name != "nt")
            super().__init__(*args, **kwargs)

        def finalize_options(self) -> None:
            super().finalize_options()
            # No file tells of another version, other flags or another PyTorch. With ninja, which
            # compares the commands, BuildExtension does the same.
            self.force = True

        def run(self) -> None:
            if getattr(self, "editable_mode", False):  # setuptools would start from nothing
                tag = f"{self.plat_name}-{sys.implementation.cache_tag}"
                self.build_temp = os.path.join("build", f"temp.{tag}")
            check_compiler()
            self._report()
            self._write_argument_tables()
            self._forget_libraries_left_out()
            super().run()

        def build_extensions(self) -> None:
            if os.name == "nt":  # setuptools looks for MSVC alone; clang-cl takes its place
                self.compiler.initialize()
                self.compiler.cc = os.environ["CXX"]
            super().build_extensions()

        def build_extension(self, ext: setuptools.Extension) -> None:
            name = ext.name.rpartition(".")[2]
            if not any(file.startswith(f"csrc/{name[1:]}/") for file in ext.sources):
                stop(f"csrc/{name[1:]} holds no sources; the source tree is incomplete.")
            # Without the name of a wheel: the same objects serve any.
            version = self.distribution.get_version().partition("+")[0]
            version = define_string("SELECTIVE_SCAN_VERSION", version)
            ext.extra_compile_args["cxx"].append(version)
            shared, self.build_temp = self.build_temp, os.path.join(self.build_temp, name)
            try:
                if name == "_cuda":
                    ext.sources += self._write_instantiations()
                self._forget_stale_cuda_objects()
                super().build_extension(ext)
            finally:
                self.build_temp = shared

        def _write_argument_tables(self) -> None:
            header = argument_tables.write(Path(self.build_temp, "argument_tables")).resolve()
            for ext in self.extensions:
                ext.include_dirs.append(str(header.parent))
                ext.depends.append(str(header))

        def _write_instantiations(self) -> list[str]:
            folder = Path(self.build_temp, "instantiations")
            return [path.as_posix() for path in instantiations.write(folder, chosen_methods())]

        def _report(self) -> None:
            kind = "sanitizer" if sanitize else "debug" if debug else "release"
            version = self.distribution.get_version()
            print(f"selective_scan {version}, {kind} build with torch {torch.__version__}:")
            print(f"  methods: {', '.join(chosen_methods())}")
            print("  CPU library: built")
            if plan.toolkit is None:
                print(f"  CUDA library: left out, {plan.reason}")
            else:
                release = ".".join(map(str, plan.toolkit.version))
                names = ", ".join(map(str, plan.architectures))
                print(f"  CUDA library: built by {plan.toolkit.nvcc} (CUDA {release}) for {names}")
                if wheel := wheel_for(plan):
                    print(f"  the {wheel} wheel of a release serves these GPUs without compiling")
            print(f"  to compile: {work_text(plan, chosen_methods())}")
            print("  pip shows this and the compiler's progress where it is given -v")
            sys.stdout.flush()

        def _forget_libraries_left_out(self) -> None:
            """A library of an earlier build must not slip into a wheel."""
            if plan.toolkit is None and not self.inplace:
                left_out = self.get_ext_filename("selective_scan._cuda")
                Path(self.build_lib, left_out).unlink(missing_ok=True)

        def _forget_stale_cuda_objects(self) -> None:
            """BuildExtension has ninja follow the headers of a .cu file only if torch is a CUDA
            build; elsewhere an object older than a header is removed, so that it is rebuilt."""
            if torch.version.cuda is not None:
                return
            used = (path for path in headers() if path.parent.name != "torch")
            newest = max((path.stat().st_mtime for path in used), default=0.0)
            for compiled in Path(self.build_temp).glob("**/*.o"):
                is_torch = compiled.parent.name == "torch"
                if not is_torch and compiled.stat().st_mtime < newest:
                    compiled.unlink()

    return BuildLibraries


def make_bdist_wheel():
    from setuptools.command.bdist_wheel import bdist_wheel

    class PlatformWheel(bdist_wheel):
        """The libraries hold no Python code: one wheel serves every Python of a platform."""

        def get_tag(self) -> tuple[str, str, str]:
            return ("py3", "none", super().get_tag()[2])

    return PlatformWheel


def import_torch() -> ModuleType:
    wanted = ".".join(map(str, MINIMUM_TORCH))
    advice = (
        f"install it first (pip install 'torch>={wanted}'), "
        "then install selective_scan with pip's option --no-build-isolation."
    )
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        stop(f"building needs PyTorch {wanted} or later in this environment: {advice}")
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < MINIMUM_TORCH:
        stop(f"building needs PyTorch {wanted} or later, got {torch.__version__}: {advice}")
    return torch


def check_compiler(windows: bool = os.name == "nt") -> None:
    command = os.environ.get("CXX") or ("cl" if windows else "c++")
    if windows and "clang-cl" not in command:
        stop(
            "building on Windows needs clang-cl, which CXX is to name, for the CPU kernels are "
            f"written in vector extensions that MSVC does not have; got {command!r}."
        )
    program = command if windows else command.split()[0]
    if shutil.which(program) is None:
        stop(
            f"building needs a C++ compiler, and there is no {program} on PATH: install "
            "one (on Debian and Ubuntu: apt install g++), or name it by CXX."
        )


def prepare_ninja() -> None:
    """Finds the ninja of this environment also where the environment is not activated, and has it
    say how far it is."""
    os.environ.setdefault("NINJA_STATUS", "[%f of %t, %es] ")
    try:
        import ninja
    except ModuleNotFoundError:
        return
    os.environ["PATH"] = os.pathsep.join([ninja.BIN_DIR, os.environ.get("PATH", "")])


def main() -> None:
    if int(setuptools.__version__.split(".")[0]) < MINIMUM_SETUPTOOLS:
        stop(
            f"building needs setuptools {MINIMUM_SETUPTOOLS} or later, got "
            f"{setuptools.__version__}: run pip install --upgrade setuptools."
        )
    # Isolated builds ask for a source distribution's needs by egg_info before they make it.
    if "sdist" in sys.argv or "egg_info" in sys.argv:
        setuptools.setup()
        return
    torch = import_torch()
    prepare_ninja()
    if sys.platform == "darwin":
        # python.org's Python would compile for Intel's processors, too, for which PyTorch is not.
        os.environ.setdefault("ARCHFLAGS", f"-arch {platform.machine()}")
    debug = bool(environment_flag("DEBUG"))
    sanitize = bool(environment_flag("SELECTIVE_SCAN_SANITIZE"))
    wheel = ReleaseWheel.asked_for()
    use_cuda = environment_flag("USE_CUDA") if wheel is None else wheel.cuda is not None
    plan = plan_cuda(torch, use_cuda, sanitize, wheel and wheel.cuda)
    setuptools.setup(
        options={"egg_info": {"tag_build": f"+{wheel.name}" if wheel else ""}},
        ext_modules=make_extensions(plan, debug, sanitize),
        cmdclass={
            "build_ext": make_build_ext(torch, plan, debug, sanitize),
            "bdist_wheel": make_bdist_wheel(),
        },
    )


if __name__ == "__main__":
    main()
