"""Trains a byte-level language model of S6 layers on Python's own sources and writes some more.

The text is the standard library of the Python that runs this: nothing is downloaded. Pieces of
files are packed one behind the other, without padding, and the model starts anew at each. One call
takes about three minutes on two CPU cores:

    python examples/generate_text.py
    python examples/generate_text.py --device cuda --steps 3000 --tokens 32768 --d-model 512
"""

import argparse
import math
import sysconfig
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

from selective_scan import S6

BYTES = 256
START = BYTES  # what a sequence begins with, in front of its first byte


class ByteModel(nn.Module):
    """Bytes to logits of the next byte."""

    def __init__(self, d_model: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES + 1, d_model)
        self.s6 = S6(d_model, depth=depth)
        self.head = nn.Linear(d_model, BYTES, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, **options) -> torch.Tensor:
        """tokens: (batch, seqlen), 0 to 256. Returns logits: (batch, seqlen, 256)."""
        return self.s6(self.embedding(tokens), head=self.head, **options)


# --- data -----------------------------------------------------------------------------------------


def read_sources() -> tuple[list[bytes], list[bytes]]:
    """The standard library's files without its tests: those to learn, and every 20th to test."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    paths = (path for path in folder.rglob("*.py") if not skipped.intersection(path.parts))
    texts = [text for path in sorted(paths) if (text := path.read_bytes())]
    held_out = texts[::20]
    return [text for index, text in enumerate(texts) if index % 20], held_out


def pack(pieces: list[bytes]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs and targets, (1, total), and where sequences begin and end, (sequences + 1,).

    A sequence's inputs are START and its bytes but the last; its targets are its bytes.
    """
    targets = torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8).long()
    boundaries = torch.tensor([0, *(len(piece) for piece in pieces)]).cumsum(0)
    inputs = targets.roll(1)
    inputs[boundaries[:-1]] = START
    return inputs.unsqueeze(0), targets.unsqueeze(0), boundaries.int()


def batches(texts: list[bytes], tokens: int, longest: int) -> Iterator[list[bytes]]:
    """Lists of pieces with `tokens` bytes in all, for ever: files in random order, cut where they
    are longer than `longest`."""
    pieces, room = [], tokens
    while True:
        for index in torch.randperm(len(texts)).tolist():
            rest = texts[index]
            while rest:
                length = min(len(rest), longest, room)
                pieces.append(rest[:length])
                rest, room = rest[length:], room - length
                if room == 0:
                    yield pieces
                    pieces, room = [], tokens


# --- training and measuring -----------------------------------------------------------------------


def train(model: nn.Module, texts: list[bytes], args: argparse.Namespace) -> list[float]:
    """Trains in place and returns the bits per byte of every step."""
    parameters = list(model.parameters())
    decaying = [p for p in parameters if p.dim() > 1 and not getattr(p, "_no_weight_decay", False)]
    kept = set(decaying)
    optimizer = torch.optim.AdamW(
        [
            {"params": decaying, "weight_decay": 0.1},
            {"params": [p for p in parameters if p not in kept], "weight_decay": 0.0},
        ],
        lr=args.lr,
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps)
    data = batches(texts, args.tokens, args.longest)
    curve = []
    with tqdm(total=args.steps * args.tokens, unit="byte", unit_scale=True) as progress:
        for _ in range(args.steps):
            inputs, targets, boundaries = (part.to(args.device) for part in pack(next(data)))
            logits = model(inputs, cu_seqlens=boundaries)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            curve.append(loss.item() / math.log(2))
            progress.set_postfix_str(f"{curve[-1]:.2f} bits per byte")
            progress.update(args.tokens)
    return curve


@torch.inference_mode()
def measure(model: nn.Module, texts: list[bytes], device: str, tokens: int) -> float:
    """Bits per byte of whole files, as many of them packed as fit `tokens`, one at least."""
    bits, pieces = 0.0, []
    for index, text in enumerate(texts):
        pieces.append(text)
        is_last = index + 1 == len(texts)
        if is_last or sum(map(len, pieces)) + len(texts[index + 1]) > tokens:
            inputs, targets, boundaries = (part.to(device) for part in pack(pieces))
            logits = model(inputs, cu_seqlens=boundaries)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            bits += loss.item() / math.log(2)
            pieces = []
    return bits / sum(map(len, texts))


def bigram_bits(learned: list[bytes], texts: list[bytes]) -> float:
    """Bits per byte of a model that knows how often each byte follows each, one added to all."""
    counts = torch.ones(BYTES + 1, BYTES, dtype=torch.float64)
    inputs, targets, _ = pack(learned)
    index = (inputs * BYTES + targets).flatten()
    counts.view(-1).index_add_(0, index, torch.ones(len(index), dtype=torch.float64))
    log2 = (counts / counts.sum(1, keepdim=True)).log2()
    inputs, targets, _ = pack(texts)
    return -log2[inputs, targets].mean().item()


def zlib_bits(texts: list[bytes]) -> float:
    """Bits per byte of each file compressed on its own."""
    return 8 * sum(len(zlib.compress(text, 9)) for text in texts) / sum(map(len, texts))


# --- writing --------------------------------------------------------------------------------------


@torch.inference_mode()
def generate(model: ByteModel, prompt: bytes, args: argparse.Namespace) -> tuple[bytes, float]:
    """The prompt and `args.length` bytes more, and how many of these were written a second."""
    cache = model.s6.allocate_cache(1)
    tokens = torch.tensor([[START, *prompt]], device=args.device)
    written = bytearray(prompt)
    logits = model(tokens, cache=cache)[:, -1]
    start = time.perf_counter()
    for _ in range(args.length):
        token = (logits / args.temperature).softmax(-1).multinomial(1)
        written.append(token.item())
        logits = model(token, cache=cache)[:, -1]
    return bytes(written), args.length / (time.perf_counter() - start)


def draw(curve: list[float], levels: dict[str, float], path: str) -> None:
    figure = Figure(figsize=(8, 5), layout="constrained")
    axis = figure.subplots()
    axis.plot(curve, linewidth=0.8, label="training")
    for index, (name, level) in enumerate(levels.items()):
        axis.axhline(level, color=f"C{index + 1}", linewidth=1, label=f"{name}, {level:.2f}")
    axis.set(xlabel="step", ylabel="bits per byte", ylim=(0, 8), title="Python's own sources")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level S6 language model on Python's sources, and let it write.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--device", default="cpu", help="cpu, cuda, cuda:1 ...")
    add("--steps", type=int, default=1200)
    add("--tokens", type=int, default=4096, help="bytes of a training step")
    add("--longest", type=int, default=1024, help="bytes of a sequence")
    add("--lr", type=float, default=5e-3, help="largest learning rate")
    add("--d-model", type=int, default=128, help="width of the model")
    add("--depth", type=int, default=3, help="number of S6 layers")
    add("--held-out", type=int, default=40, help="files that are measured")
    add("--prompt", default="def ", help="what the sample begins with")
    add("--length", type=int, default=600, help="bytes of the sample")
    add("--temperature", type=float, default=0.7)
    add("--seed", type=int, default=0)
    add("--output", default="text.png", help="where the loss curve goes")
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch sees no CUDA device")
    for name in ("steps", "tokens", "longest", "d_model", "depth", "held_out", "length"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.temperature <= 0:
        parser.error("--temperature must be positive")
    return args


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    learned, held_out = read_sources()
    held_out = held_out[: args.held_out]
    model = ByteModel(args.d_model, args.depth).to(args.device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{len(learned)} files of {sum(map(len, learned)) / 1e6:.1f} MB to learn, "
        f"{len(held_out)} of {sum(map(len, held_out)) / 1e6:.2f} MB to test, "
        f"{parameters / 1e6:.2f} million parameters"
    )

    start = time.perf_counter()
    curve = train(model, learned, args)
    print(f"trained on {args.device} in {time.perf_counter() - start:.0f} s")

    model.eval()
    levels = {
        "S6": measure(model, held_out, args.device, 4 * args.tokens),
        "zlib -9": zlib_bits(held_out),
        "byte bigrams": bigram_bits(learned, held_out),
    }
    print("bits per byte of the held-out files:")
    for name, bits in levels.items():
        print(f"  {name:12} {bits:.3f}")

    text, speed = generate(model, args.prompt.encode(), args)
    print(f"written from the cache, {speed:.0f} bytes a second:\n")
    print(text.decode("utf-8", errors="replace"))
    draw(curve, levels, args.output)
    print(f"\nloss curve: {args.output}")


if __name__ == "__main__":
    main()
