"""The benchmarks' harness: problems and their exact results, users' calls, tables of records."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

import selective_scan
from problem import METHODS
from test_benchmarks import BENCHMARKS


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a module of the benchmarks' harness."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: importlib.import_module(f"harness.{name}")


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("tables")


def test_the_points_of_the_sweep(harness):
    """Every point of the sweep differs from its neighbor, and neighbors are ordinary calls."""
    cliffs = harness("cliffs")
    for base in cliffs.BASES.values():
        points = cliffs.find_points(base)
        assert len({(point.axis, point.value) for point in points}) == len(points)
        for axis in {point.axis for point in points}:
            of_axis = [point for point in points if point.axis == axis]
            neighbours = {point.neighbour for point in of_axis}
            assert not neighbours & {point.problem for point in of_axis if not point.change}, axis
        for point in points:
            assert point.problem != point.neighbour or point.change, point
            assert point.problem.shape.dim % point.problem.shape.groups == 0


def test_users_calls_are_calls(harness):
    users, problems = harness("users"), harness("problems")
    found = users.calls("cuda")
    names = [call.name for call in found]
    assert len(set(names)) == len(names)
    for call in [*found, *users.calls("cpu"), *users.calls("cuda", quick=True)]:
        assert call.name in names
        assert call.model
        assert min(call.sizes) >= 1
        assert call.dtype in problems.DTYPES
        if call.kind == "scan":
            assert call.dim % call.groups == 0
            assert call.sizes == (call.batch, call.dim, call.seqlen, call.dstate, call.groups)
            assert call.problem.variant.name == call.variant
    for call in users.calls("cpu"):
        assert call.batch <= 4
        assert call.dtype == "float32"
    assert {call.kind for call in users.calls("cpu")} == {"scan", "layer", "token"}


def layout(tensor: torch.Tensor) -> list[int]:
    """Returns the strides except those of dimensions of one element, which are arbitrary."""
    return [step for step, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]


@pytest.mark.parametrize("kind", ["mamba", "jamba"])
def test_padded_rows_are_those_of_transformers(harness, monkeypatch, kind):
    """The benchmark's padded inputs have the shapes, dtypes and strides of a recorded call by
    transformers' layers with a mask."""
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    integration = importlib.import_module("selective_scan.integrations.transformers")
    calls = []

    def scan(*arguments, **options):
        calls.append(arguments)
        return selective_scan.selective_scan_fn(*arguments, **options)

    monkeypatch.setattr(integration, "selective_scan_fn", scan)
    sizes = {"hidden_size": 32, "vocab_size": 50, "num_hidden_layers": 1}
    config = {
        "mamba": lambda: transformers.MambaConfig(**sizes),
        "jamba": lambda: transformers.JambaConfig(
            **sizes, num_attention_heads=2, num_key_value_heads=2, intermediate_size=32,
            num_experts=1, num_experts_per_tok=1, attn_layer_offset=1, attn_layer_period=2,
        ),
    }[kind]()  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.randint(50, (2, 12))
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    with integration.enable([kind]), torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model(tokens, attention_mask=mask, use_cache=False)
    ((u, delta, A, B, C, _, z, *_),) = calls
    theirs = {"u": u, "delta": delta, "A": A, "B": B[:, None], "C": C[:, None], "z": z}

    problems = harness("problems")
    variant = problems.VARIANTS["padded" if kind == "mamba" else "padded-normed"]
    problem = problems.Problem(problems.Shape("same", 2, 64, 12, 16), "bfloat16", variant)
    ours = harness("operators").make_scan(problem, torch.device("cpu"), seed=1).tensors
    for name, tensor in theirs.items():
        assert ours[name].shape == tensor.shape, name
        assert ours[name].dtype == tensor.dtype, name
        assert layout(ours[name]) == layout(tensor), name


def test_the_backward_pass_is_what_it_adds(harness, monkeypatch):
    user_calls = harness("user_calls")
    samples = {
        ("ours", "forward"): [1.0, 1.0],
        ("ours", "training forward"): [2.0, 3.0],
        ("ours", "forward + backward"): [6.0, 8.0],
        ("mamba_ssm", "token"): [5.0, 5.0],
    }
    monkeypatch.setattr(user_calls, "sample", lambda *_, **__: samples)
    timed = user_calls.Timed({}, torch.device("cpu"))
    assert timed.sample() == {
        "ours": {"forward": [1.0, 1.0], "backward": [4.0, 5.0]},
        "mamba_ssm": {"token": [5.0, 5.0]},
    }


@pytest.mark.parametrize("variant", ["no-z", "padded", "padded-normed"])
def test_mamba_ssm_is_given_what_it_takes(harness, monkeypatch, variant):
    """mamba_ssm gets rows along time, of one dtype; a call that it cannot run has no passes."""
    given = []

    class Module(ModuleType):
        def fwd(self, *arguments):
            given.append(arguments)
            return torch.empty(1), torch.empty(1)

        def bwd(self, *arguments):
            given.append(arguments)

    monkeypatch.setitem(sys.modules, "selective_scan_cuda", Module("selective_scan_cuda"))
    scan = small_scan(harness, dtype="bfloat16", variant=variant)
    passes = harness("peers").mamba_ssm_passes(scan, backward=True)
    if variant == "padded-normed":
        assert passes == {}
        return
    assert passes.keys() == {"forward", "backward"}
    for run in passes.values():
        run()
    assert len(given) == 3
    for tensor in (x for call in given for x in call if isinstance(x, torch.Tensor)):
        assert tensor.stride(-1) == 1


def small_scan(harness, operator="selective_scan", dtype="float32", variant="plain", method="zoh"):
    problems = harness("problems")
    shape = problems.Shape("odd", 3, 8, 45, 5, 2 if operator == "selective_scan" else 1)
    problem = problems.Problem(shape, dtype, problems.VARIANTS[variant], method, operator)
    return harness("operators").make_scan(problem, torch.device("cpu"), seed=1)


@pytest.mark.parametrize(
    ("operator", "variant"),
    [
        *(("selective_scan", v) for v in ("complex", "constant", "reverse", "initial-state")),
        *(("selective_scan", v) for v in ("padded", "padded-normed", "events")),
        *((operator, "plain") for operator in ("selective_scan", "diagonal", "adaptive_unitary")),
    ],
)
def test_check_accepts_the_kernels(harness, operator, variant):
    scan = small_scan(harness, operator, "float64", variant, "foh")
    errors = harness("checks").check(scan, backward=True)
    states = set() if operator == "diagonal" else {"last_state"}
    assert errors.keys() == {"out", *states, *(f"d{name}" for name in scan.tensors)}


@pytest.mark.parametrize("variant", ["plain", "no-z", "complex", "constant", "complex-constant",
                                     "channel-last", "reverse", "initial-state", "padded",
                                     "padded-normed", "events"])  # fmt: skip
@pytest.mark.parametrize("method", METHODS)
def test_exact_results_are_those_of_the_reference(harness, variant, method):
    scan = small_scan(harness, dtype="float64", variant=variant, method=method)
    expected = selective_scan.selective_scan_ref(**scan.keywords(), return_last_state=True)
    torch.testing.assert_close(scan.exact(scan.tensors), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("operator", ["diagonal", "adaptive_unitary"])
def test_exact_results_of_the_other_operators(harness, operator):
    scan = small_scan(harness, operator, "float64")
    out, _ = scan.exact(scan.tensors, torch.arange(8))
    torch.testing.assert_close(out, scan.reference(scan.tensors), rtol=1e-12, atol=1e-12)


def test_bytes_that_a_pass_moves(harness):
    """A pass reads each input once and writes each result once."""
    scan = small_scan(harness)
    sequences, projections, A = 4 * 3 * 8 * 45, 2 * 3 * 2 * 5 * 45, 8 * 5
    forward = sequences + projections + A + 3 * A + 2 * 8  # 3 A: the last states of a batch of 3
    assert scan.bytes_moved("forward") == 4 * forward
    scan = small_scan(harness, "diagonal", "bfloat16")
    count = scan.tensors["a"].numel()
    assert scan.bytes_moved("forward") == 2 * 3 * count  # a, b, h
    assert scan.bytes_moved("backward") == 2 * 5 * count  # a, h, dh, da, db


@pytest.mark.parametrize("groups", [1, 2])
def test_textbook_scan_is_the_reference(harness, groups):
    scan = small_scan(harness)
    scan.tensors |= {name: scan.tensors[name][:, :groups] for name in "BC"}
    textbook_scan = harness("peers").textbook_scan
    torch.testing.assert_close(textbook_scan(**scan.keywords()), scan.reference(scan.tensors))
    with pytest.raises(ValueError, match="knows zoh"):
        textbook_scan(**{**scan.keywords(), "reverse": True})


@pytest.mark.parametrize("operator", ["selective_scan", "diagonal", "adaptive_unitary"])
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_check_refuses_a_wrong_kernel(harness, monkeypatch, operator, which):
    scan = small_scan(harness, operator)
    right = getattr(scan, which)

    def wrong(*arguments):
        result = right(*arguments)
        tensor = result[0] if which == "forward" else list(result.values())[1]
        tensor.mul_(1.01)
        return result

    monkeypatch.setattr(scan, which, wrong)
    with pytest.raises(RuntimeError, match=r"relative error of (out|ddelta|db|ddt) 1\.0e-02"):
        harness("checks").check(scan, backward=True)


def test_a_result_that_is_no_number_is_infinitely_wrong(harness):
    """Otherwise a maximum over several results could pass over it."""
    error = harness("checks").relative_l2(torch.tensor([1.0, torch.nan]), torch.ones(2))
    assert max(0.0, error) == torch.inf


def test_tables_are_those_of_the_records(tables, monkeypatch, capsys, tmp_path):
    texts = {path: path.read_text() for path in tables._FILES}
    for name in tables.TABLES:
        assert sum(text.count(f"<!-- {name} table -->\n") for text in texts.values()) == 1, name
    assert tables.main(["--check"]) == 0

    row = next(r for r in tables.load("h200_users")["rows"] if r["name"] == "mamba-130m train")
    copies = [tmp_path / path.name for path in texts]
    for copy, text in zip(copies, texts.values(), strict=True):
        copy.write_text(text.replace(f"| {row['time']['median']:.3f} (", "| 0.001 ("))
    monkeypatch.setattr(tables, "_FILES", copies)
    assert tables.main(["--check"]) == 1
    assert "README.md is not up to date" in capsys.readouterr().err
    assert tables.main([]) == 0
    assert [copy.read_text() for copy in copies] == list(texts.values())


def test_the_readme_shows_calls_that_there_are(tables, harness):
    names = {call.name for call in harness("users").calls("cuda")}
    assert names.issuperset(tables._README_SCANS)
    assert names.issuperset(tables._README_MODELS)
