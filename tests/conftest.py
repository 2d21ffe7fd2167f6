"""Shared fixtures: devices, seeds, process groups, compiled modules that expose parts of csrc."""

import os
import re
import secrets
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SEED_VARIABLE = "SELECTIVE_SCAN_TEST_SEED"
# Fresh data on every run. Set before pytest-xdist starts its workers, which inherit it.
os.environ.setdefault(SEED_VARIABLE, str(secrets.randbelow(2**31)))


def pytest_configure(config):
    # Processes that share the processor, and the programs they start, run one thread each. A test
    # of several threads uses `set_threads`.
    if config.getoption("numprocesses", default=None):
        os.environ["OMP_NUM_THREADS"] = "1"
    config.addinivalue_line("markers", "cuda: needs a CUDA device and the CUDA library")
    config.addinivalue_line("markers", "slow: part of the exhaustive suite (make test-all)")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for groups
def pytest_collection_modifyitems(config, items):
    """Groups the tests of each compiled module in one process, since others would wait for the
    build, which takes half a minute and makes them slow tests.

    Half of all tests are on CUDA. If CUDA cannot be tested, they are deselected here, since
    skipping them one by one takes a minute in all; pytest_terminal_summary() reports it.
    """
    for item in items:
        for name in {"core", "plan_bindings", "functions"} & set(item.fixturenames):
            item.add_marker(pytest.mark.xdist_group(name))
            item.add_marker(pytest.mark.slow)
        if "cuda_device" in item.fixturenames:
            item.add_marker(pytest.mark.cuda)
    if why_no_cuda():
        config.hook.pytest_deselected(items=[it for it in items if it.get_closest_marker("cuda")])
        items[:] = [it for it in items if not it.get_closest_marker("cuda")]


def pytest_terminal_summary(terminalreporter):
    if reason := why_no_cuda():
        terminalreporter.write_line(f"The tests on CUDA were left out: {reason}")


def seed_text() -> str:
    return f"{SEED_VARIABLE}={os.environ[SEED_VARIABLE]}"


def pytest_report_header(config):
    return f"selective_scan: {seed_text()}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        report.sections.append(("seed", f"repeat with {seed_text()}"))
    return report


def why_no_cuda() -> str | None:
    """Returns why CUDA cannot be tested here, or None if it can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    from selective_scan import backends

    status = backends()["cuda"]
    return None if status.available else f"the cuda backend is unavailable: {status.reason}"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request) -> str:
    """Runs every test that takes `device` on the CPU kernels and on the CUDA kernels.

    Without a CUDA device the CUDA tests are not collected. The CPU library is always built, so its
    absence is a failure.
    """
    return request.param


@pytest.fixture
def cuda_device() -> str:
    """For tests that only make sense on CUDA."""
    return "cuda"


@pytest.fixture
def step_kernel(request) -> None:
    """Skips a test if its GPU lacks the kernel of a step through layers."""
    from gpu_kernels import skip_without_step

    for name in {"device", "cuda_device"} & set(request.fixturenames):
        skip_without_step(request.getfixturevalue(name))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skips a test whose call is refused because the GPU has less shared memory than Hopper. On
    Hopper no call is refused for that reason."""
    from gpu_kernels import has_less_shared_memory

    try:
        return (yield)
    except RuntimeError as error:
        is_refusal = re.search(r"shared memory.*GPU|GPU.*shared memory", str(error))
        if is_refusal and torch.cuda.is_available() and has_less_shared_memory():
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def ranks(request, tmp_path_factory):
    """The processes of a process group, on the CPU by gloo or each with a GPU by NCCL. There are
    four, or two if there are fewer than four GPUs."""
    from ranks import Ranks

    count = 4
    if request.param == "cuda":
        gpus = torch.cuda.device_count()
        if gpus < 2:
            pytest.skip(f"needs two GPUs, there are {gpus}")
        count = 4 if gpus >= 4 else 2
    ranks = Ranks(count, tmp_path_factory.mktemp("ranks"), request.param)
    yield ranks
    ranks.close()


@pytest.fixture(autouse=True)
def seeded(request):
    """Seeds torch from the run's seed and the test's name, so that a test repeats alone."""
    from problem import generator

    name = request.node.nodeid.split("::", 1)[-1]
    # pytest-xdist appends a test's group.
    for mark in request.node.iter_markers("xdist_group"):
        name = name.removesuffix(f"@{mark.args[0]}")
    torch.manual_seed(generator(name).initial_seed())


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Forgets what earlier tests compiled: PyTorch limits how often a function is compiled anew."""
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


@pytest.fixture
def compat_modules():
    """Installs selective_scan.compat's modules, whether or not the real packages are installed."""
    from selective_scan import compat

    with compat.install(force=True, raw=True) as handle:
        yield handle


@pytest.fixture
def set_threads():
    """torch.set_num_threads, with the number restored after the test."""
    count = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(count)


@pytest.fixture
def check_threads(set_threads):
    """Asserts that the named results of a function without arguments have the same bits on a CPU
    with any number of threads."""
    from problem import assert_same_bits

    def check(results, counts=(1, 2, 5)):
        found = []
        for count in counts:
            set_threads(count)
            found.append(results())
        assert_same_bits(*found)

    return check


@pytest.fixture(scope="session")
def bindings_folder(request, tmp_path_factory) -> Path:
    """The folder of compiled test modules: in pytest's cache, or in a temporary folder if the cache
    is off. All processes of a run share it."""
    if cache := getattr(request.config, "cache", None):
        return Path(cache.mkdir("bindings"))
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "bindings"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def core(bindings_folder):
    """The scalar core of csrc/core as a Python module, compiled once per version of the sources."""
    import core_build

    # Tests call it for few numbers, so optimization would take longer than it saves.
    return core_build.load(bindings_folder, flags=("-O0",))


@pytest.fixture(scope="session")
def plan_bindings(bindings_folder):
    """The plans of CUDA calls, as exposed by plan_bindings.cpp."""
    from plan_calls import load_bindings

    return load_bindings(bindings_folder)


@pytest.fixture(scope="session")
def plan(plan_bindings):
    from plan_calls import Planner

    return Planner(plan_bindings)


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    """setup.py as a module; it builds something only when it is run as a script."""
    from programs import load

    return load(Path(__file__).parent.parent / "setup.py")
