"""Exports a Mamba language model as two ONNX graphs, with which onnxruntime generates text.

``prompt.onnx`` takes any number of tokens, (batch, length), and returns the logits of the last one
and the states after it. ``step.onnx`` takes a token and the states, and returns logits and states.
Both run without PyTorch and this package. The program generates with them and with PyTorch, and
prints whether the tokens are the same, and the times of a prompt and of a token with both.

    python examples/onnx_language_model.py                                # random weights
    python examples/onnx_language_model.py --model state-spaces/mamba-130m  # from the hub
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import torch
from torch import Tensor, nn

from selective_scan.compat.config_mamba import MambaConfig
from selective_scan.compat.generation import InferenceParams
from selective_scan.compat.mixer_seq_simple import MambaLMHeadModel
from selective_scan.onnx import export


class Prompt(nn.Module):
    """Maps tokens to the last one's logits and the states of all layers after it."""

    def __init__(self, model: MambaLMHeadModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        params = InferenceParams(max_seqlen=0, max_batch_size=0)
        logits = self.model(tokens, inference_params=params, num_last_tokens=1).logits
        states = params.key_value_memory_dict.values()
        return logits[:, 0], *[state for layer in states for state in layer]


class Step(nn.Module):
    """Maps a token of each sequence, (batch, 1), and states to logits and the next states."""

    def __init__(self, model: MambaLMHeadModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, token: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        new = [state.clone() for state in states]  # the layers change these in place
        layers = dict(enumerate(zip(new[::2], new[1::2], strict=True)))
        params = InferenceParams(0, 0, seqlen_offset=1, key_value_memory_dict=layers)
        return self.model(token, inference_params=params).logits[:, 0], *new


def generate(prompt: Callable, step: Callable, tokens: Tensor, count: int) -> Tensor:
    """Generates the most probable tokens, one after another. Both calls have the inputs and outputs
    of the modules above."""
    logits, *states = prompt(tokens)
    chosen = []
    for _ in range(count):
        chosen.append(torch.as_tensor(logits).argmax(-1, keepdim=True))
        logits, *states = step(chosen[-1], *states)
    return torch.cat(chosen, 1)


def session(path: Path) -> Callable:
    """Returns a function that runs the program at a path on its inputs in order."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    made = onnxruntime.InferenceSession(path, options)
    names = [given.name for given in made.get_inputs()]

    def run(*values: Tensor) -> list[Tensor]:
        inputs = {n: value.numpy() for n, value in zip(names, values, strict=True)}
        return [torch.from_numpy(result) for result in made.run(None, inputs)]

    return run


def shortest(call: Callable, seconds: float) -> float:
    """Calls repeatedly for some seconds and returns the milliseconds of the shortest call."""
    times, end = [], time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return 1000 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a checkpoint's folder or name (default: random weights)")
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--length", type=int, default=64, help="prompt length")
    parser.add_argument("--new-tokens", type=int, default=20)
    parser.add_argument("--opset", type=int, default=27, help="18 for runtimes that know no newer")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each measurement")
    parser.add_argument("--output", type=Path, help="folder for the two programs")
    options = parser.parse_args()
    for name in ("d_model", "layers", "vocabulary", "length", "new_tokens"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")

    torch.manual_seed(0)
    if options.model is not None:
        model = MambaLMHeadModel.from_pretrained(options.model)
    else:
        sizes = (options.d_model, 0, options.layers, options.vocabulary)
        model = MambaLMHeadModel(MambaConfig(*sizes, tie_embeddings=False))
    model.eval()
    # PyTorch treats a size of 1 in an example as constant.
    tokens = torch.randint(model.config.vocab_size, (2, max(2, options.length)))
    folder = options.output or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)

    prompt, step = Prompt(model), Step(model)
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    with torch.no_grad():
        _, *states = prompt(tokens)
        rows = {0: batch}
        export(
            *(prompt, (tokens,), folder / "prompt.onnx"),
            dynamic=({0: batch, 1: length},),
            opset=options.opset,
        )
        export(
            *(step, (tokens[:, :1], *states), folder / "step.onnx"),
            dynamic=(rows, (rows,) * len(states)),
            opset=options.opset,
        )
        programs = [session(folder / name) for name in ("prompt.onnx", "step.onnx")]
        one = tokens[:1, : options.length]  # another batch than the example's
        runs = {"PyTorch": (prompt, step), "onnxruntime": programs}
        made = {
            name: generate(*run, one, options.new_tokens)[0].tolist() for name, run in runs.items()
        }
        for name, generated in made.items():
            print(f"{name:12}", *generated)
        is_same = made["PyTorch"] == made["onnxruntime"]
        print("the same tokens" if is_same else "other tokens")

        print(f"\n{'milliseconds':12} {'prompt':>9} {'token':>9}")
        for name, (first, next_) in runs.items():
            _, *states = first(one)
            begin = shortest(lambda call=first: call(one), options.seconds)
            further = shortest(lambda call=next_, s=states: call(one[:, :1], *s), options.seconds)
            print(f"{name:12} {begin:9.2f} {further:9.2f}")
    raise SystemExit(not is_same)


if __name__ == "__main__":
    main()
