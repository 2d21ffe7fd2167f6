"""setup.py: what it builds, for which GPUs, and by which tools."""

import os
import re
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import setuptools

from selective_scan._discretization import METHODS

SUPPORTED = {"75", "80", "86", "87", "89", "90", "100", "103", "120"}
# All default architectures except the last, which also has PTX.
ALL = ["7.5", "8.0", "8.6", "9.0", "10.0"]


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
    headers = [path for path in setup.headers() if path.parent.name != "torch"]
    newest = max(path.stat().st_mtime for path in headers)
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
