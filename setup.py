"""Builds the libraries of selective_scan: `_cpu.so` always, `_cuda.so` if nvcc is found and torch
is a CUDA build.

Environment variables:
    USE_CUDA=0|1                never build the CUDA library, or build it in any case
    CUDA_HOME                   the first place to look for nvcc (then PATH, then the usual places)
    TORCH_CUDA_ARCH_LIST        GPU architectures: "Ampere;Hopper", "9.0+PTX", "9.0a", "native",
                                "all", "9.0-virtual" for PTX only; if unset, those of the visible
                                GPUs, or all if there are none
    SELECTIVE_SCAN_METHODS      "zoh,foh" builds only these discretization methods, in less time
    SELECTIVE_SCAN_NVCC_FLAGS   additional flags for nvcc, such as "-Xptxas -O0"
    MAX_JOBS                    the number of files compiled in parallel
    SELECTIVE_SCAN_WHEEL        cpu, cu12 or cu13: the kind of a release's wheel, which becomes part
                                of the version, as in 0.1.0+cu13 (tools/build_wheel.sh sets it)
    DEBUG=1                     line information, no optimization, assertions on host and device
    SELECTIVE_SCAN_SANITIZE=1   only the CPU library, with AddressSanitizer and UBSan
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
# Restricts the library to the functions of PyTorch 2.10's stable ABI.
TORCH_TARGET_FLAG = "-DTORCH_TARGET_VERSION=0x020a000000000000"

# The wheels of a release, and the major version of CUDA of each.
RELEASE_WHEELS = {"cpu": None, "cu12": 12, "cu13": 13}
# The core time to compile all methods: for the CPU library, and for the CUDA library per GPU
# architecture. docs/contributing.md has the times of a release.
CPU_MINUTES = 6
CUDA_MINUTES = 14


def stop(sentence: str) -> NoReturn:
    """Ends the build with one sentence instead of a traceback."""
    sys.exit(f"selective_scan: {sentence}")


def environment_flag(name: str) -> bool | None:
    """Returns the value of an on/off variable, None if it is unset or empty."""
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
    """One of the wheels of a release: for CPUs only, or also for the GPUs of a CUDA version."""

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
    """Loads a module from its file, since the source tree is not on Python's module path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look up the types of their fields there
    spec.loader.exec_module(module)
    return module


instantiations = load_module(ROOT / "csrc" / "cuda" / "instantiations.py")
argument_tables = load_module(ROOT / "csrc" / "torch" / "argument_tables.py")
cuda = load_module(ROOT / "csrc" / "cuda" / "toolkit.py")


def chosen_methods() -> list[str]:
    """Returns the discretization methods to build: those of SELECTIVE_SCAN_METHODS, or all if it is
    unset or empty."""
    text = os.environ.get("SELECTIVE_SCAN_METHODS", "")
    names = re.findall(r"[^\s,;]+", text.lower())
    known = instantiations.method_names()
    if not set(names) <= set(known):
        stop(f"SELECTIVE_SCAN_METHODS must be some of {', '.join(known)}, got {text!r}")
    return [name for name in known if name in names or not names]


def method_flags(methods: list[str]) -> list[str]:
    """Returns the flags that tell the C++ sources which methods are built, none if all are."""
    known = instantiations.method_names()
    if methods == known:
        return []
    bits = sum(1 << known.index(name) for name in methods)
    return [f"{'/D' if os.name == 'nt' else '-D'}SELECTIVE_SCAN_METHOD_BITS={bits}u"]


# --- what to build of the CUDA library ------------------------------------------------------------


@dataclass(frozen=True)
class CudaPlan:
    """The plan for the CUDA library: with which toolkit and for which GPUs, or why not at all."""

    toolkit: cuda.Toolkit | None = None
    architectures: tuple[cuda.Architecture, ...] = ()
    reason: str = ""


def plan_cuda(
    torch: ModuleType, use_cuda: bool | None, sanitize: bool, major: int | None = None
) -> CudaPlan:
    """Decides whether and how to build the CUDA library. Visible GPUs affect the architectures
    only, since build machines often have none. `major` is CUDA's version; None takes torch's."""
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
    """Returns the sources of a library, relative to the root as setuptools requires."""
    found = {path for pattern in patterns for path in ROOT.glob(pattern)}
    relative = sorted(path.relative_to(ROOT) for path in found)
    stems = [path.with_suffix("") for path in relative]
    for stem in stems:
        if stems.count(stem) > 1:  # NAME.cpp and NAME.cu would be compiled into one NAME.o
            raise ValueError(f"two sources share the object file name {stem}")
    return [path.as_posix() for path in relative]


def dispatch_sources(backend: str) -> list[str]:
    """Returns the sources of csrc/torch for one library. A file whose name has no backend's suffix
    is compiled into both, since the libraries share no symbols."""
    other = {"cpu": "_cuda.cpp", "cuda": "_cpu.cpp"}[backend]
    return [path for path in sources("csrc/torch/*.cpp") if not path.endswith(other)]


def cpu_sources() -> list[str]:
    return [*sources("csrc/cpu/**/*.cpp"), *dispatch_sources("cpu")]


def cuda_sources() -> list[str]:
    """Returns the sources of the source tree; the instantiations are written during the build."""
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
    # PyTorch's headers are system includes, so that their own warnings are not reported.
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
    """Returns the kernels' flags. PyTorch's headers are not included, as kernels use no tensors."""
    flags = ["-std=c++20", "--expt-relaxed-constexpr"]
    # The smaller format needs a driver that CUDA 13 requires anyway, but CUDA 12 does not.
    is_13 = plan.toolkit is not None and plan.toolkit.version >= (13, 0)
    flags.append("--compress-mode=size" if is_13 else "-Xfatbin=-compress-all")
    # BuildExtension disables the operators of __half and __nv_bfloat16 for ATen's sake.
    for macro in ("HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_CONVERSIONS", "HALF2_OPERATORS"):
        flags.append(f"-U__CUDA_NO_{macro}__")
    # -G: device code without optimization and with line information.
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
    # Python loads PyTorch's libraries with local visibility. Only a NEEDED entry for libtorch.so,
    # which a linker with --as-needed would drop, makes their symbols visible to this library.
    flags = [*folders, "-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed"]
    flags.append(f"-Wl,--version-script={ROOT / 'csrc' / 'torch' / 'exports.map'}")
    if sanitize:
        return flags + sanitizer_flags()
    # The names of unexported symbols, a tenth of the libraries' size, only serve debuggers.
    return flags if debug else [*flags, "-Wl,--strip-all"]


def cudart_flags(toolkit: cuda.Toolkit) -> list[str]:
    """Links the static CUDA runtime, so that one build serves torch of several CUDA versions."""
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
        language="c++",  # otherwise the C compiler would link an extension of .cu files
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
            # -O3 would make the host code, which only prepares launches, larger but no faster.
            *cxx_flags(includes, debug, sanitize, "-O2"),
            *methods,
            "-DUSE_CUDA",
            define_string("SELECTIVE_SCAN_CUDA_ARCHITECTURES", names),
        ]
        nvcc = [*nvcc_flags(plan, debug), *methods]
        link = [*link, *cudart_flags(plan.toolkit)]
        extensions.append(make_extension("_cuda", files, cuda_cxx, nvcc, link))
        cpp_extension.CUDA_HOME = plan.toolkit.home  # None if torch is a CPU build
    return extensions


# --- the report before compilation ----------------------------------------------------------------


def wheel_for(plan: CudaPlan) -> str | None:
    """Returns the release wheel that serves the GPUs of a plan, by binary code or PTX, if any."""
    if plan.toolkit is None:
        return None
    compiled = [cuda.Architecture.parse(text) for text in cuda.ALL_ARCHITECTURES]
    is_served = all(
        any(a.major == c.major and a.minor >= c.minor for c in compiled) for a in plan.architectures
    )
    of_cuda = (name for name, major in RELEASE_WHEELS.items() if major == plan.toolkit.version[0])
    return next(of_cuda, None) if is_served else None


def work_text(plan: CudaPlan, methods: list[str]) -> str:
    """Describes the number of sources to compile and the approximate time."""
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
            if getattr(self, "editable_mode", False):  # setuptools would use a new, empty folder
                tag = f"{self.plat_name}-{sys.implementation.cache_tag}"
                self.build_temp = os.path.join("build", f"temp.{tag}")
            check_compiler()
            self._report()
            self._write_argument_tables()
            self._forget_libraries_left_out()
            super().run()

        def build_extensions(self) -> None:
            if os.name == "nt":  # setuptools only looks for MSVC, which clang-cl replaces
                self.compiler.initialize()
                self.compiler.cc = os.environ["CXX"]
            super().build_extensions()

        def build_extension(self, ext: setuptools.Extension) -> None:
            name = ext.name.rpartition(".")[2]
            if not any(file.startswith(f"csrc/{name[1:]}/") for file in ext.sources):
                stop(f"csrc/{name[1:]} holds no sources; the source tree is incomplete.")
            # Without the wheel's suffix, so that the same objects serve every wheel.
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
            """Deletes a library of an earlier build, which must not slip into a wheel."""
            if plan.toolkit is None and not self.inplace:
                left_out = self.get_ext_filename("selective_scan._cuda")
                Path(self.build_lib, left_out).unlink(missing_ok=True)

        def _forget_stale_cuda_objects(self) -> None:
            """Removes objects that are older than a header, so that they are rebuilt. This is
            needed for CPU builds of torch, where ninja does not track the headers of .cu files."""
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
        """A wheel for every Python of a platform, since the libraries contain no Python code."""

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
    """Finds the environment's ninja even if the environment is not activated, and makes ninja print
    its progress."""
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
    # An isolated build of a source distribution first runs egg_info to query its requirements.
    if "sdist" in sys.argv or "egg_info" in sys.argv:
        setuptools.setup()
        return
    torch = import_torch()
    prepare_ninja()
    if sys.platform == "darwin":
        # python.org's Python would also compile for Intel, which PyTorch does not support.
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
