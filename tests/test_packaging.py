"""setup.py: what it builds, for which GPUs, and the properties of the libraries and the wheel."""

import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import setuptools

from selective_scan._discretization import METHODS

ROOT = Path(__file__).resolve().parent.parent
SETUP = ROOT / "setup.py"
SUPPORTED = {"75", "80", "86", "87", "89", "90", "100", "103", "120"}
# All default architectures except the last, which also has PTX.
ALL = ["7.5", "8.0", "8.6", "9.0", "10.0"]


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    """setup.py as a module; it builds something only when it is run as a script."""
    name = "selective_scan_setup"
    spec = importlib.util.spec_from_file_location(name, SETUP)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look up the types of their fields
    spec.loader.exec_module(module)
    return module


def fake_torch(
    version: str = "2.13.0", cuda: str | None = None, gpus: tuple[tuple[int, int], ...] = ()
) -> SimpleNamespace:
    """Returns the part of a torch module that the plan reads: a CUDA build or not, GPUs if any."""
    return SimpleNamespace(
        __version__=version,
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(
            device_count=lambda: len(gpus), get_device_capability=lambda index: gpus[index]
        ),
    )


def write_nvcc(folder: Path, release: str, home: Path | None = None) -> Path:
    """Writes a script that answers like nvcc of CUDA `release` with its toolkit at `home`."""
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    home = home or folder
    for part in ("include", "lib64"):
        (home / part).mkdir(parents=True, exist_ok=True)
    nvcc.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        f'  --version) echo "Cuda compilation tools, release {release}, V{release}.88" ;;\n'
        "  --list-gpu-code) echo sm_80; echo sm_90; echo sm_120 ;;\n"
        f'  --dryrun) echo "#\\$ TOP={home}/bin/.." >&2\n'
        f"""    echo '#$ INCLUDES="-I{home}/include"  ' >&2\n"""
        f"""    echo '#$ LIBRARIES=  "-L{home}/missing" "-L{home}/lib64"' >&2 ;;\n"""
        "esac\n"
    )
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    return nvcc


def make_build(setup, folder: Path, torch=None, plan=None, inplace: bool = False):
    """Returns the command that builds the libraries of a plan below a folder."""
    torch, plan = torch or fake_torch(), plan or setup.CudaPlan()
    command = setup.make_build_ext(torch, plan, debug=False, sanitize=False)(
        setuptools.Distribution({"name": "x", "version": "1"})
    )
    command.build_lib, command.build_temp = str(folder / "lib"), str(folder / "temp")
    command.inplace = inplace
    command.ensure_finalized()
    return command


posix_only = pytest.mark.skipif(sys.platform == "win32", reason="the fake nvcc is a shell script")


# --- GPU architectures ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9.0", ["9.0"]),
        ("9.0+PTX", ["9.0+PTX"]),
        ("9.0a", ["9.0a"]),
        ("12.0f", ["12.0f"]),
        ("Ampere;Hopper", ["8.0", "8.6+PTX", "9.0+PTX"]),
        ("hopper ampere", ["8.0", "8.6+PTX", "9.0+PTX"]),
        ("Ampere+Tegra", ["8.7"]),
        ("12.0, 8.0;9.0", ["8.0", "9.0", "12.0"]),
        ("8.0;8.0+PTX;8.0", ["8.0+PTX"]),
        (";8.0;", ["8.0"]),
        ("Turing", ["7.5+PTX"]),
        ("7.5-virtual", ["7.5-virtual"]),
        ("7.5-virtual;7.5", ["7.5+PTX"]),
        # 10.3 runs the code of 10.0, since its own code is not trusted.
        ("Blackwell", ["10.0", "12.0", "12.1+PTX"]),
        ("10.3a+PTX", ["10.0+PTX"]),
    ],
)
def test_architecture_list(setup, text, expected):
    assert [str(architecture) for architecture in setup.cuda.parse_architectures(text)] == expected


def test_nvcc_flags_of_an_architecture(setup):
    (architecture,) = setup.cuda.parse_architectures("9.0a+PTX")
    assert architecture.nvcc_flags() == [
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90a,code=compute_90a",
    ]
    (architecture,) = setup.cuda.parse_architectures("7.5-virtual")
    assert architecture.nvcc_flags() == ["-gencode=arch=compute_75,code=compute_75"]


@pytest.mark.parametrize(
    ("text", "visible", "expected"),
    [
        *((text, [], [*ALL, "12.0+PTX"]) for text in ("", "all", " All ")),
        # If nothing is requested, the architectures of the visible GPUs.
        ("", [(9, 0)], ["9.0+PTX"]),
        ("", [(9, 0), (8, 6), (9, 0)], ["8.6", "9.0+PTX"]),
        ("", [(7, 5)], ["7.5+PTX"]),
        ("", [(10, 3)], ["10.0+PTX"]),
        ("", [(7, 0), (8, 9)], ["8.9+PTX"]),  # the kernels cannot run on the first
        ("", [(7, 0)], [*ALL, "12.0+PTX"]),
        ("", [(8, 0), (12, 5)], [*ALL, "12.0+PTX"]),  # newer than nvcc
        ("8.0", [(9, 0), (8, 6)], ["8.0"]),
        ("native", [(9, 0), (8, 6)], ["8.6", "9.0"]),
    ],
)
def test_architectures_that_are_chosen(setup, text, visible, expected):
    chosen = setup.cuda.choose_architectures(text, SUPPORTED, visible)
    assert [str(architecture) for architecture in chosen] == expected


def test_an_older_nvcc_supports_fewer_architectures(setup):
    chosen = setup.cuda.choose_architectures("all", {"70", "80", "86"}, visible=[])
    assert [str(architecture) for architecture in chosen] == ["8.0", "8.6+PTX"]


def test_a_cuda_build_of_torch_tells_the_gpus(setup):
    gpus = ((8, 0), (9, 0))
    assert setup.cuda.visible_capabilities(fake_torch(cuda="13.0", gpus=gpus)) == [*gpus]
    assert setup.cuda.visible_capabilities(fake_torch(cuda="13.0")) == []


@posix_only
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("echo 8.6; echo 9.0", [(8, 6), (9, 0)]),
        ("echo 'could not talk to the NVIDIA driver'; exit 9", []),
        (None, []),
    ],
    ids=["two GPUs", "no driver", "no nvidia-smi"],
)
def test_the_driver_tells_the_gpus_to_a_cpu_build_of_torch(
    setup, monkeypatch, tmp_path, answer, expected
):
    if answer is not None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{answer}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup.cuda.visible_capabilities(fake_torch()) == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        *(
            (f"8.0;{text}", f"must be all, native or hold entries such as .*'{re.escape(text)}'")
            for text in ("9", "sm_90", "9.0b", "Hooper", "9.0+ptxas", "90")
        ),
        ("9.0;11.0", r"asks for 11\.0, which this nvcc does not support"),
        ("Volta", r"asks for 7\.0\+PTX; the kernels need 7\.5 or later"),
        ("native", "native needs a GPU"),
    ],
)
def test_architectures_that_are_refused(setup, text, sentence):
    with pytest.raises(ValueError, match=sentence):
        setup.cuda.choose_architectures(text, SUPPORTED, visible=[])


# --- the decision about the CUDA library ----------------------------------------------------------


@posix_only
@pytest.mark.parametrize(("use_cuda", "cuda"), [(None, "13.0"), (True, "13.0"), (True, None)])
def test_cuda_is_built_where_nvcc_is(setup, monkeypatch, tmp_path, use_cuda, cuda):
    write_nvcc(tmp_path, "13.0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "")
    monkeypatch.setattr(setup.cuda, "visible_capabilities", lambda torch: [])
    plan = setup.plan_cuda(fake_torch(cuda=cuda), use_cuda, sanitize=False)
    assert [str(architecture) for architecture in plan.architectures] == ["8.0", "9.0", "12.0+PTX"]


@posix_only
@pytest.mark.parametrize("use_cuda", [None, True])
@pytest.mark.parametrize(
    ("release", "reason"),
    [
        ("11.8", r"C\+\+20 needs 12\.0 or later"),
        ("12.8", r"but torch 2\.13\.0 of CUDA 13\.0"),
        (None, "nvcc was not found"),
    ],
)
def test_an_nvcc_that_is_missing_or_unfit(setup, monkeypatch, tmp_path, release, reason, use_cuda):
    nvcc = release and str(write_nvcc(tmp_path, release))
    monkeypatch.setattr(setup.cuda, "find_nvcc", lambda: nvcc)
    torch = fake_torch(cuda="13.0")
    if use_cuda is None:
        assert re.search(reason, setup.plan_cuda(torch, None, sanitize=False).reason)
        return
    with pytest.raises(SystemExit, match=f"USE_CUDA=1 asks for the CUDA library, but .*{reason}"):
        setup.plan_cuda(torch, use_cuda, sanitize=False)


@posix_only
@pytest.mark.parametrize(
    ("torch", "use_cuda", "reason"),
    [
        ("2.13.0+cpu", None, "torch 2.13.0+cpu is not a CUDA build (USE_CUDA=1 builds it anyway)"),
        ("2.13.0", False, "USE_CUDA=0"),
    ],
)
def test_cuda_is_left_out(setup, monkeypatch, tmp_path, torch, use_cuda, reason):
    write_nvcc(tmp_path, "13.0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    cuda = None if torch.endswith("+cpu") else "13.0"
    plan = setup.plan_cuda(fake_torch(torch, cuda), use_cuda, sanitize=False)
    assert (plan.toolkit, plan.reason) == (None, reason)


@posix_only
def test_a_wheel_of_a_release_wants_its_own_cuda(setup, monkeypatch, tmp_path):
    """PyTorch's CUDA version does not matter, since the library contains its own CUDA runtime."""
    write_nvcc(tmp_path, "12.8")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    torch = fake_torch(cuda="13.0")
    plan = setup.plan_cuda(torch, use_cuda=True, sanitize=False, major=12)
    assert plan.toolkit.version == (12, 8)
    with pytest.raises(SystemExit, match=r"of CUDA 12\.8, but this wheel is for CUDA 13"):
        setup.plan_cuda(torch, use_cuda=True, sanitize=False, major=13)


@pytest.mark.parametrize(
    ("value", "expected"), [("", None), ("cpu", ("cpu", None)), ("cu12", ("cu12", 12))]
)
def test_the_wheel_that_is_asked_for(setup, monkeypatch, value, expected):
    monkeypatch.setenv("SELECTIVE_SCAN_WHEEL", value)
    wheel = setup.ReleaseWheel.asked_for()
    assert wheel == (expected and setup.ReleaseWheel(*expected))


def test_an_unknown_wheel_is_refused(setup, monkeypatch):
    monkeypatch.setenv("SELECTIVE_SCAN_WHEEL", "cu11")
    with pytest.raises(SystemExit, match="must be cpu, cu12, cu13 or unset, got 'cu11'"):
        setup.ReleaseWheel.asked_for()


@posix_only
@pytest.mark.parametrize(
    ("release", "architectures", "wheel"),
    [
        ("13.0", "9.0", "cu13"),
        ("12.8", "8.0;9.0", "cu12"),
        ("13.0", "7.5", "cu13"),
        ("13.0", "8.7", "cu13"),  # runs 8.6's code
        ("13.0", "11.0", None),
    ],
)
def test_what_is_said_before_it_is_compiled(
    setup, monkeypatch, tmp_path, capsys, release, architectures, wheel
):
    write_nvcc(tmp_path, release)
    monkeypatch.setenv("MAX_JOBS", "3")
    monkeypatch.delenv("SELECTIVE_SCAN_METHODS", raising=False)
    toolkit = setup.cuda.Toolkit.ask(str(tmp_path / "bin" / "nvcc"))
    plan = setup.CudaPlan(toolkit, tuple(setup.cuda.parse_architectures(architectures)))
    assert setup.wheel_for(plan) == wheel
    texts = [
        setup.work_text(it, methods)
        for it in (plan, setup.CudaPlan())
        for methods in (list(METHODS), ["zoh"])
    ]
    numbers = [tuple(map(int, re.findall(r"\d+", text))) for text in texts]
    (files, minutes, jobs), (few_files, few_minutes, _), (cpu_files, cpu_minutes, _), _ = numbers
    assert files > few_files > cpu_files == len(setup.cpu_sources())
    assert minutes > few_minutes > 0
    assert minutes > cpu_minutes > 0
    assert jobs == 3

    make_build(setup, tmp_path, plan=plan)._report()
    of_cuda = capsys.readouterr().out
    assert (
        f"{toolkit.nvcc} (CUDA {release}) for {', '.join(map(str, plan.architectures))}\n"
        in of_cuda
    )
    assert re.findall(r"the (\w+) wheel of a release", of_cuda) == ([wheel] if wheel else [])
    assert texts[0] in of_cuda
    make_build(setup, tmp_path, plan=setup.CudaPlan(reason="USE_CUDA=0"))._report()
    of_cpu = capsys.readouterr().out
    assert "release build with torch 2.13.0:" in of_cpu
    assert "CUDA library: left out, USE_CUDA=0\n" in of_cpu
    assert texts[2] in of_cpu


def test_jobs_are_a_number(setup, monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "all")
    with pytest.raises(SystemExit, match="MAX_JOBS must be a number of files, got 'all'"):
        setup.work_text(setup.CudaPlan(), list(METHODS))


def test_a_build_without_ninja_takes_nothing_for_up_to_date(setup, monkeypatch, tmp_path):
    """The version, the flags and PyTorch may be others than those of the library in build/."""
    import torch.utils.cpp_extension

    monkeypatch.setattr(torch.utils.cpp_extension, "is_ninja_available", lambda: False)
    assert make_build(setup, tmp_path).force


@pytest.mark.parametrize("inplace", [False, True])
def test_a_library_of_an_earlier_build_is_not_packed(setup, tmp_path, inplace):
    command = make_build(setup, tmp_path, inplace=inplace)
    stale = tmp_path / "lib" / command.get_ext_filename("selective_scan._cuda")
    stale.parent.mkdir(parents=True)
    stale.touch()
    command._forget_libraries_left_out()
    assert stale.exists() == inplace


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_objects_older_than_a_header_are_compiled_again(setup, tmp_path, cuda):
    """With a CUDA build of torch, ninja itself compares them with the headers."""
    newest = max(path.stat().st_mtime for path in setup.headers())
    objects = {}
    for name, age in (("cuda/old", 60), ("cuda/new", -60), ("torch/old", 60)):
        objects[name] = tmp_path / "temp" / f"{name}.o"
        objects[name].parent.mkdir(parents=True, exist_ok=True)
        objects[name].touch()
        os.utime(objects[name], (newest - age, newest - age))
    make_build(setup, tmp_path, fake_torch(cuda=cuda))._forget_stale_cuda_objects()
    removed = {name for name, path in objects.items() if not path.exists()}
    assert removed == ({"cuda/old"} if cuda is None else set())


@posix_only
@pytest.mark.parametrize(
    ("release", "compression"),
    [("13.0", "--compress-mode=size"), ("12.8", "-Xfatbin=-compress-all")],
)
def test_what_the_cuda_library_is_compiled_with(setup, monkeypatch, tmp_path, release, compression):
    from torch.utils import cpp_extension

    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    monkeypatch.setenv("SELECTIVE_SCAN_METHODS", "zoh")
    monkeypatch.setenv("SELECTIVE_SCAN_NVCC_FLAGS", "-lineinfo --threads=2")
    toolkit = setup.cuda.Toolkit.ask(str(write_nvcc(tmp_path, release)))
    plan = setup.CudaPlan(toolkit, tuple(setup.cuda.parse_architectures("8.0;9.0")))
    cpu, cuda = setup.make_extensions(plan, debug=False, sanitize=False)
    assert [cpu.name, cuda.name] == ["selective_scan._cpu", "selective_scan._cuda"]
    assert (cpu.sources, cuda.sources) == (setup.cpu_sources(), setup.cuda_sources())
    cxx, nvcc = (cuda.extra_compile_args[name] for name in ("cxx", "nvcc"))
    assert {"-DUSE_CUDA", '-DSELECTIVE_SCAN_CUDA_ARCHITECTURES="8.0;9.0"'} <= set(cxx)
    assert "-DUSE_CUDA" not in cpu.extra_compile_args["cxx"]
    for flags in (cpu.extra_compile_args["cxx"], cxx, nvcc):
        assert "-DSELECTIVE_SCAN_METHOD_BITS=1u" in flags
    assert [flag for flag in nvcc if "compress" in flag] == [compression]
    assert "-U__CUDA_NO_HALF_OPERATORS__" in nvcc
    assert [flag for flag in nvcc if flag.startswith("-gencode")] == [
        f"-gencode=arch=compute_{number},code=sm_{number}" for number in (80, 90)
    ]
    assert {"-lineinfo", "--threads=2"} <= set(nvcc)
    assert f"-L{tmp_path / 'lib64'}" in cuda.extra_link_args
    assert "-lcudart_static" in cuda.extra_link_args
    assert "-lcudart_static" not in cpu.extra_link_args
    assert toolkit.home == cpp_extension.CUDA_HOME


@posix_only
def test_nvcc_tells_where_its_toolkit_is(setup, tmp_path):
    """nvcc on PATH may be a wrapper far from the toolkit; missing folders are left out."""
    home = tmp_path / "toolkit"
    write_nvcc(home, "13.0")
    wrapper = write_nvcc(tmp_path / "local", "13.0", home=home)
    toolkit = setup.cuda.Toolkit.ask(str(wrapper))
    assert toolkit.home == str(home)
    assert toolkit.version == (13, 0)
    assert toolkit.include_dirs == [str(home / "include")]
    assert toolkit.library_dirs == [str(home / "lib64")]


@posix_only
def test_a_toolkit_without_nvcc_is_not_that_of_a_wrapper(setup, tmp_path):
    wrapper = write_nvcc(tmp_path / "cuda", "13.0", home=tmp_path / "elsewhere")
    assert setup.cuda.Toolkit.ask(str(wrapper)).home == str(tmp_path / "cuda")


@posix_only
def test_a_program_that_is_no_nvcc_is_refused(setup, tmp_path):
    nvcc = write_nvcc(tmp_path, "13.0")
    nvcc.write_text("#!/bin/sh\n")
    with pytest.raises(ValueError, match="nvcc does not answer as nvcc does; set CUDA_HOME to"):
        setup.cuda.Toolkit.ask(str(nvcc))


@posix_only
def test_cuda_home_goes_before_path_and_usual_places(setup, monkeypatch, tmp_path):
    on_path, in_home, *usual = (
        write_nvcc(tmp_path / name, "13.0") for name in ("path", "home", "cuda-12.8", "cuda-13.0")
    )
    places = [str(nvcc.parent.parent) for nvcc in usual]
    monkeypatch.setattr(setup.cuda.glob, "glob", lambda it: places if it.endswith("-*") else [])
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", str(on_path.parent))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert setup.cuda.find_nvcc() == str(in_home)
    monkeypatch.delenv("CUDA_HOME")
    assert setup.cuda.find_nvcc() == str(on_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup.cuda.find_nvcc() == str(usual[1])  # the newest


@pytest.mark.parametrize(
    ("value", "expected"), [("1", True), ("ON", True), ("0", False), ("no", False), ("", None)]
)
def test_environment_flag(setup, monkeypatch, value, expected):
    monkeypatch.setenv("USE_CUDA", value)
    assert setup.environment_flag("USE_CUDA") is expected


def test_environment_flag_refuses(setup, monkeypatch):
    monkeypatch.setenv("USE_CUDA", "maybe")
    with pytest.raises(SystemExit, match="USE_CUDA must be 0 or 1, got 'maybe'"):
        setup.environment_flag("USE_CUDA")


# --- sources, wheel, libraries --------------------------------------------------------------------


def test_every_source_is_compiled(setup):
    cpu, cuda = setup.cpu_sources(), setup.cuda_sources()
    assert {path for path in cpu if path.endswith("_cuda.cpp") or "/cuda/" in path} == set()
    assert {path for path in cuda if path.endswith("_cpu.cpp") or "/cpu/" in path} == set()
    compiled = {path for suffix in ("cpp", "cu") for path in ROOT.glob(f"csrc/**/*.{suffix}")}
    assert {ROOT / path for path in cpu + cuda} == compiled


def test_methods_are_those_of_the_package(setup):
    assert setup.instantiations.method_names() == list(METHODS)


def test_instantiations_are_written_where_they_changed(setup, tmp_path):
    write = setup.instantiations.write
    folder = tmp_path / "instantiations"
    paths = write(folder, METHODS)
    assert sorted(folder.iterdir()) == paths
    sources = setup.instantiations.SOURCES
    assert len(paths) == len({source.file(name) for source in sources for name in METHODS})
    changed, *others = write(folder, ["foh", "zoh"])
    assert sorted(folder.iterdir()) == [changed, *others]
    assert {path.stem.rpartition("_")[2] for path in {*paths} - {changed, *others}} == {
        "bilinear",
        "series",
    }
    changed.write_text("another text")
    for path in others:
        os.utime(path, ns=(0, 0))
    assert write(folder, ["zoh", "foh"]) == [changed, *others]
    assert changed.read_text() != "another text"
    assert {path.stat().st_mtime_ns for path in others} == {0}


def test_tables_of_arguments_are_written_where_they_changed(setup, tmp_path):
    header = setup.argument_tables.write(tmp_path)
    assert all(name in header.read_text() for name in setup.argument_tables.TABLES)
    before = header.stat().st_mtime_ns
    assert setup.argument_tables.write(tmp_path).stat().st_mtime_ns == before
    header.write_text("")
    assert "kSelectiveScan" in setup.argument_tables.write(tmp_path).read_text()


def test_the_methods_that_share_kernels_are_those_of_the_launchers(setup):
    header = (ROOT / "csrc/core/discretization/method.h").read_text(encoding="utf-8")
    function = header[header.index("constexpr Method kernel_method") :]
    names = re.findall(r"method == Method::k(\w+)", function)
    assert sorted(map(str.lower, names)) == sorted(setup.instantiations.SERIES)


def test_instantiations_include_what_there_is(setup, tmp_path):
    for path in setup.instantiations.write(tmp_path, ["zoh"]):
        included = re.findall(r'#include "(.+)"', path.read_text())
        assert included
        assert [header for header in included if not (ROOT / "csrc" / header).exists()] == []
        assert "METHOD" not in path.read_text()


@pytest.mark.parametrize(
    ("text", "expected", "flags"),
    [
        ("", METHODS, []),
        ("rk4,foh", ("foh", "rk4"), ["34u"]),
        (" ZOH ; foh ", ("zoh", "foh"), ["3u"]),
        (",".join(METHODS), METHODS, []),
    ],
)
def test_chosen_methods(setup, monkeypatch, text, expected, flags):
    monkeypatch.setenv("SELECTIVE_SCAN_METHODS", text)
    assert tuple(setup.chosen_methods()) == expected
    found = setup.method_flags(setup.chosen_methods())
    assert [flag.rpartition("=")[2] for flag in found] == flags


def test_chosen_methods_refuse_an_unknown_one(setup, monkeypatch):
    monkeypatch.setenv("SELECTIVE_SCAN_METHODS", "zoh,euler")
    with pytest.raises(SystemExit, match=r"must be some of zoh, foh, .*, got 'zoh,euler'"):
        setup.chosen_methods()


def test_sources_with_one_object_file_are_refused(setup, monkeypatch, tmp_path):
    for name in ("scan.cpp", "scan.cu"):
        (tmp_path / name).touch()
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    with pytest.raises(ValueError, match="share the object file name scan"):
        setup.sources("*.cpp", "*.cu")


def test_wheel_serves_every_python(setup):
    distribution = setuptools.Distribution(
        {"name": "x", "version": "1", "ext_modules": [setuptools.Extension("x", [])]}
    )
    command = setup.make_bdist_wheel()(distribution)
    command.ensure_finalized()
    python, abi, platform = command.get_tag()
    assert (python, abi) == ("py3", "none")
    assert platform != "any"


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        ("sys.modules['torch'] = None", "building needs PyTorch 2.10 or later in this environment"),
        ("import torch; torch.__version__ = '2.9.1'", "building needs PyTorch .* got 2.9.1"),
        ("import setuptools; setuptools.__version__ = '65.5'", "building needs setuptools 77"),
        ("import os; os.environ['CXX'] = 'no-c++ -O2'", "building needs a C.* no no-c.. on PATH"),
    ],
    ids=["no torch", "old torch", "old setuptools", "no compiler"],
)
def test_what_is_missing_is_said_in_one_sentence(prepare, expected):
    code = (
        f"import runpy, sys; {prepare}; sys.argv[1:] = ['build_ext']; "
        f"runpy.run_path({str(SETUP)!r}, run_name='__main__')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    line = result.stderr.splitlines()[-1]
    assert re.match(f"selective_scan: {expected}", line)
    assert "install" in line


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("script", sorted((ROOT / "tools").glob("*.sh")), ids=lambda it: it.name)
def test_a_script_without_arguments_prints_its_usage(script):
    result = subprocess.run(["bash", str(script)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr.startswith(f"{script.name} ")
    assert "unbound variable" not in result.stderr


@pytest.mark.parametrize("compiler", ["", "cl", r"C:\mingw64\bin\g++.exe"])
def test_msvc_is_refused(setup, monkeypatch, compiler):
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(SystemExit, match=r"Windows needs clang-cl, .* got '"):
        setup.check_compiler(windows=True)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ELF files are Linux's")
@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf (binutils)")
@pytest.mark.parametrize("name", ["_cpu", "_cuda"])
def test_what_the_libraries_need(name):
    """libtorch.so must be needed, or its symbols are not found at load time. Anything of Python or
    of PyTorch's C++ ABI would tie the library to one version."""
    import selective_scan

    library = Path(selective_scan.__file__).with_name(f"{name}.so")
    if name == "_cuda" and not library.exists():
        pytest.skip("the CUDA library is not built")
    command = ["readelf", "--dynamic", "--dyn-syms", "--wide", str(library)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", output))
    assert "libtorch.so" in needed
    foreign = ("libpython", "libtorch_python", "libtorch_cuda", "libc10", "libcudart")
    assert not [entry for entry in needed if entry.startswith(foreign)]
    missing = re.findall(r"\bUND (\S+)", output)
    assert not [symbol for symbol in missing if "14selective_scan" in symbol]
