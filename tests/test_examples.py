"""The examples run and report what they measured; the demonstration draws its picture."""

import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import programs

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SCRIPT = EXAMPLES / "train_digits.py"
LONG = EXAMPLES / "train_long.py"


def run(*arguments: str, script: Path = SCRIPT) -> subprocess.CompletedProcess:
    return programs.run(script, *arguments)


@pytest.fixture
def needs_the_libraries_of_the_demo():
    for name in ("matplotlib", "sklearn", "tqdm"):
        pytest.importorskip(name)


@pytest.mark.slow
@pytest.mark.usefixtures("needs_the_libraries_of_the_demo")
def test_digits_learns_and_draws(tmp_path, device):
    picture = tmp_path / "digits.png"
    small = ["--epochs", "4", "--d-model", "32", "--depth", "1", "--batch-size", "32"]
    graphs = ["--graphs"] if device == "cuda" else []
    result = run(*small, "--output", str(picture), "--device", device, *graphs)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[-1].endswith(str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000
    accuracy = float(re.search(r"^test accuracy: ([\d.]+)%$", result.stdout, re.MULTILINE)[1])
    assert 20 < accuracy <= 100  # chance is 10 %
    assert "epoch 4/4" in result.stderr  # the progress bar
    assert all(float(loss) > 0 for loss in re.findall(r"loss=([^\]]+)", result.stderr))


@pytest.mark.usefixtures("needs_the_libraries_of_the_demo")
def test_weight_decay_leaves_poles_and_skips_alone():
    example = runpy.run_path(str(SCRIPT))
    model = example["DigitClassifier"](8, 2)
    names = {parameter: name for name, parameter in model.named_parameters()}
    decaying, others = example["parameter_groups"](model, 0.01)
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.01, 0)
    kept = {f"s6.layers.{i}.{name}" for i in range(2) for name in ("A_log", "D")}
    assert {names.pop(parameter) for parameter in others["params"]} == kept
    assert set(decaying["params"]) == set(names)


@pytest.mark.slow
@pytest.mark.usefixtures("needs_the_libraries_of_the_demo")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--epochs", "0"), "--epochs must be at least 1"),
        (("--d-model", "x"), "invalid int"),
        (("--graphs",), "--graphs needs --device cuda, got --device cpu"),
    ],
)
def test_digits_refuses_bad_arguments(arguments, expected):
    result = run(*arguments)
    assert result.returncode == 2
    assert expected in result.stderr


@pytest.mark.slow
def test_speed_up_transformers_refuses_bad_arguments():
    result = run("--runs", "0", script=EXAMPLES / "speed_up_transformers.py")
    assert result.returncode == 2
    assert "--runs must be at least 1" in result.stderr


@pytest.mark.slow
def test_speed_up_transformers_measures_each_pass(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    transformers.FalconMambaConfig(
        hidden_size=32, num_hidden_layers=1, vocab_size=50
    ).save_pretrained(tmp_path)
    small = ["--seqlen", "8", "--new-tokens", "3", "--runs", "1", "--config", str(tmp_path)]
    result = run(*small, script=EXAMPLES / "speed_up_transformers.py")
    assert result.returncode == 0, result.stderr
    title, header, *rows = [line.split() for line in result.stdout.splitlines()]
    assert title[0] == "FalconMambaForCausalLM,"
    assert header[:3] == ["milliseconds", "transformers", "selective_scan"]
    assert [row[0] for row in rows] == ["forward", "train", "generate"]
    assert all(float(number) > 0 for row in rows for number in row[1:])


@pytest.mark.slow
def test_text_is_learned_and_written(tmp_path):
    picture = tmp_path / "text.png"
    small = ["--steps", "25", "--tokens", "1024", "--d-model", "32", "--depth", "1"]
    few = ["--held-out", "3", "--length", "20", "--prompt", "import ", "--output", str(picture)]
    checkpoint = tmp_path / "model"
    script = EXAMPLES / "language_model.py"
    result = run(*small, *few, "--checkpoint", str(checkpoint), script=script)
    assert result.returncode == 0, result.stderr
    bits = {
        name: float(re.search(rf"^  {name} +([\d.]+)$", result.stdout, re.MULTILINE)[1])
        for name in ("Mamba", "zlib -9", "byte bigrams")
    }
    assert 0 < bits["zlib -9"] < bits["byte bigrams"] < 8
    assert 0 < bits["Mamba"] < 7  # 8 without learning
    assert re.search(r"from the states, \d+ bytes a second:\n\nimport ", result.stdout)
    assert {path.name for path in checkpoint.iterdir()} == {"config.json", "pytorch_model.bin"}
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "bits per byte" in result.stderr  # the progress bar


@pytest.mark.slow
@pytest.mark.parametrize(("opset", "length"), [("18", "1"), ("18", "7"), ("27", "7")])
def test_onnxruntime_generates_the_tokens_of_pytorch(opset, length, tmp_path):
    pytest.importorskip("onnxruntime", minversion="1.32")
    small = ["--d-model", "16", "--layers", "1", "--vocabulary", "50", "--length", length]
    few = ["--new-tokens", "8", "--seconds", "0", "--opset", opset, "--output", str(tmp_path)]
    result = run(*small, *few, script=EXAMPLES / "onnx_language_model.py")
    assert result.returncode == 0, result.stderr
    ours, theirs, verdict, _, _, *times = [line.split() for line in result.stdout.splitlines()]
    assert len(ours) == len(theirs) == 9
    assert ours[1:] == theirs[1:]
    assert " ".join(verdict) == "the same tokens"
    assert all(float(number) > 0 for row in times for number in row[1:])
    assert {"prompt.onnx", "step.onnx"} <= {path.name for path in tmp_path.iterdir()}


def test_onnxruntime_generates_one_token_at_least():
    pytest.importorskip("onnxruntime")
    result = run("--new-tokens", "0", script=EXAMPLES / "onnx_language_model.py")
    assert result.returncode == 2
    assert "--new-tokens must be at least 1" in result.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("needs_the_libraries_of_the_demo")
@pytest.mark.parametrize("method", [(), ("--trapezoid",)], ids=["zoh", "trapezoid"])
def test_parity_is_told_by_states_that_rotate(method, tmp_path):
    picture = tmp_path / "parity.png"
    few = ["--bits", "16", "--steps", "250", "--test-size", "200", "--measure-every", "125"]
    result = run(*few, *method, "--output", str(picture), script=EXAMPLES / "parity.py")
    assert result.returncode == 0, result.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    *_, title, real, rotating = result.stdout.splitlines()
    assert title == "accuracy on the parity of 16 bits:"
    accuracies = [
        float(re.fullmatch(rf"  {name} +([\d.]+)%", line)[1])
        for name, line in (("real states", real), ("states that rotate", rotating))
    ]
    assert accuracies[0] < 75 < 95 < accuracies[1]
    assert "250/250" in result.stderr  # the progress bar


def test_packing_of_text():
    example = runpy.run_path(str(EXAMPLES / "language_model.py"))
    inputs, targets, boundaries = example["pack"]([b"ab", b"c", b"def"])
    assert inputs.tolist() == [[256, 97, 256, 256, 100, 101]]
    assert bytes(targets[0].tolist()) == b"abcdef"
    assert boundaries.tolist() == [0, 2, 3, 6]
    batches = example["batches"]([b"x" * 100, b"y" * 7], tokens=50, longest=30)
    for _ in range(5):
        pieces = next(batches)
        assert sum(map(len, pieces)) == 50
        assert max(map(len, pieces)) <= 30


SMALL = ("--device", "cpu", "--seqlen", "501", "--d-model", "8", "--depth", "1")


@pytest.mark.slow
def test_long_sequences_over_two_processes_give_the_losses_of_one():
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = [sys.executable, *torchrun, str(LONG), *SMALL, "--check", "--steps", "3"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "the same"
    assert len(re.findall(r"^ +\d  +\d\.\d+  \d\.\d+$", result.stdout, re.MULTILINE)) == 3
    assert "tokens_per_s" in result.stderr


def last_loss(output: str) -> float:
    return float(re.search(r"loss of step 9: ([\d.]+)$", output, re.MULTILINE)[1])


# Runs a program, and kills it while it writes its third checkpoint.
KILLED = """
import os, pathlib, runpy, signal, sys, torch
saved, save = [], torch.save
def save_or_die(state, path):
    saved.append(path)
    if len(saved) == 3:
        pathlib.Path(path).write_bytes(b"half of it")
        os.kill(os.getpid(), signal.SIGKILL)
    save(state, path)
torch.save = save_or_die
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_long_training_goes_on_after_it_was_killed(tmp_path):
    options = ("--steps", "9", "--save-every", "2", "--checkpoint", str(tmp_path / "saved.pt"))
    (tmp_path / "killed.py").write_text(KILLED)
    killed = run(str(LONG), *SMALL, *options, script=tmp_path / "killed.py")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = run(*SMALL, *options, script=LONG)
    assert resumed.returncode == 0, resumed.stderr
    assert "going on behind step 4" in resumed.stdout
    (tmp_path / "saved.pt").unlink()
    whole = run(*SMALL, *options, script=LONG)
    assert whole.returncode == 0, whole.stderr
    assert "going on" not in whole.stdout
    assert last_loss(resumed.stdout) == pytest.approx(last_loss(whole.stdout), rel=1e-4)
