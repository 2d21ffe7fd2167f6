"""Trains a byte-level language model, mamba_ssm's MambaLMHeadModel, on Python's own sources, saves
it, loads it again and generates text.

The text is the standard library of the Python that runs the program: nothing is downloaded. Pieces
of files are packed one after another, without padding, and the model starts anew at each. One call
takes about three minutes on two CPU cores:

    python examples/language_model.py
    python examples/language_model.py --device cuda --steps 3000 --tokens 32768 --d-model 512
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

from selective_scan.compat.config_mamba import MambaConfig
from selective_scan.compat.mixer_seq_simple import MambaLMHeadModel

BYTES = 256
START = BYTES  # the token that precedes a sequence's first byte


# --- data -----------------------------------------------------------------------------------------


def read_sources() -> tuple[list[bytes], list[bytes]]:
    """Returns the standard library's files without its tests: the training files, and every 20th
    for testing."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    paths = (path for path in folder.rglob("*.py") if not skipped.intersection(path.parts))
    texts = [text for path in sorted(paths) if (text := path.read_bytes())]
    held_out = texts[::20]
    return [text for index, text in enumerate(texts) if index % 20], held_out


def pack(pieces: list[bytes]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns inputs and targets, (1, total), and the sequences' boundaries, (sequences + 1,).

    A sequence's inputs are START and all of its bytes except the last; its targets are its bytes.
    """
    targets = torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8).long()
    boundaries = torch.tensor([0, *(len(piece) for piece in pieces)]).cumsum(0)
    inputs = targets.roll(1)
    inputs[boundaries[:-1]] = START
    return inputs.unsqueeze(0), targets.unsqueeze(0), boundaries.int()


def batches(texts: list[bytes], tokens: int, longest: int) -> Iterator[list[bytes]]:
    """Yields lists of pieces with `tokens` bytes in total, forever: files in random order, cut into
    pieces of at most `longest` bytes."""
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


def cross_entropy(
    model: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    boundaries: torch.Tensor,
    **options,
) -> torch.Tensor:
    """Returns the cross entropy of packed sequences. The logits of START and of the embedding's
    padding are left out."""
    logits = model(inputs, cu_seqlens=boundaries).logits[..., :BYTES]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)


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
            loss = cross_entropy(model, inputs, targets, boundaries)
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
    """Returns the bits per byte of whole files. As many as fit into `tokens` bytes are packed
    together, at least one."""
    bits, pieces = 0.0, []
    for index, text in enumerate(texts):
        pieces.append(text)
        is_last = index + 1 == len(texts)
        if is_last or sum(map(len, pieces)) + len(texts[index + 1]) > tokens:
            inputs, targets, boundaries = (part.to(device) for part in pack(pieces))
            loss = cross_entropy(model, inputs, targets, boundaries, reduction="sum")
            bits += loss.item() / math.log(2)
            pieces = []
    return bits / sum(map(len, texts))


def bigram_bits(learned: list[bytes], texts: list[bytes]) -> float:
    """Returns the bits per byte of a bigram model with add-one smoothing."""
    counts = torch.ones(BYTES + 1, BYTES, dtype=torch.float64)
    inputs, targets, _ = pack(learned)
    index = (inputs * BYTES + targets).flatten()
    counts.view(-1).index_add_(0, index, torch.ones(len(index), dtype=torch.float64))
    log2 = (counts / counts.sum(1, keepdim=True)).log2()
    inputs, targets, _ = pack(texts)
    return -log2[inputs, targets].mean().item()


def zlib_bits(texts: list[bytes]) -> float:
    """Returns the bits per byte of the files, each compressed separately."""
    return 8 * sum(len(zlib.compress(text, 9)) for text in texts) / sum(map(len, texts))


# --- writing --------------------------------------------------------------------------------------


def generate(
    model: MambaLMHeadModel, prompt: bytes, args: argparse.Namespace
) -> tuple[bytes, float]:
    """Returns the prompt with `args.length` generated bytes, and the generated bytes per second."""
    tokens = torch.tensor([[START, *prompt]], device=args.device)
    options = {"top_k": 0, "top_p": args.top_p, "temperature": args.temperature, "cg": True}
    # An untimed call first, which does the one-time setup.
    model.generate(tokens, tokens.shape[1] + 2, **options)
    start = time.perf_counter()
    length = tokens.shape[1] + args.length
    written = model.generate(tokens, length, vocab_size=BYTES, **options)[0, 1:].tolist()
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
        description="Train a Mamba language model of bytes on Python's sources, and let it write.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--device", default="cpu", help="cpu, cuda, cuda:1 ...")
    add("--steps", type=int, default=1200)
    add("--tokens", type=int, default=4096, help="bytes per training step")
    add("--longest", type=int, default=1024, help="bytes of the longest sequence")
    add("--lr", type=float, default=5e-3, help="largest learning rate")
    add("--d-model", type=int, default=128, help="width of the model")
    add("--depth", type=int, default=3, help="number of Mamba layers")
    add("--held-out", type=int, default=40, help="files to evaluate on")
    add("--prompt", default="def ", help="start of the sample")
    add("--length", type=int, default=600, help="sample length in bytes")
    add("--temperature", type=float, default=0.7)
    add("--top-p", type=float, default=0.95, help="total probability of the bytes to sample from")
    add("--seed", type=int, default=0)
    add("--checkpoint", default="language_model", help="folder to save the model in")
    add("--output", default="text.png", help="file for the loss curve")
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch sees no CUDA device")
    for name in ("steps", "tokens", "longest", "d_model", "depth", "held_out", "length"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.temperature <= 0:
        parser.error("--temperature must be positive")
    if not 0 < args.top_p <= 1:
        parser.error("--top-p must be above 0, and 1 at most")
    return args


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    learned, held_out = read_sources()
    held_out = held_out[: args.held_out]
    # With so few tokens an untied head costs almost nothing, and the model learns faster.
    config = MambaConfig(
        d_model=args.d_model, n_layer=args.depth, vocab_size=BYTES + 1, tie_embeddings=False
    )
    model = MambaLMHeadModel(config, device=args.device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{len(learned)} files of {sum(map(len, learned)) / 1e6:.1f} MB to learn, "
        f"{len(held_out)} of {sum(map(len, held_out)) / 1e6:.2f} MB to test, "
        f"{parameters / 1e6:.2f} million parameters"
    )

    start = time.perf_counter()
    curve = train(model, learned, args)
    print(f"trained on {args.device} in {time.perf_counter() - start:.0f} s")

    model.save_pretrained(args.checkpoint)
    model = MambaLMHeadModel.from_pretrained(args.checkpoint, device=args.device).eval()
    print(f"saved in {args.checkpoint} and loaded from there")
    levels = {
        "Mamba": measure(model, held_out, args.device, 4 * args.tokens),
        "zlib -9": zlib_bits(held_out),
        "byte bigrams": bigram_bits(learned, held_out),
    }
    print("bits per byte of the held-out files:")
    for name, bits in levels.items():
        print(f"  {name:12} {bits:.3f}")

    text, speed = generate(model, args.prompt.encode(), args)
    print(f"written from the states, {speed:.0f} bytes a second:\n")
    print(text.decode("utf-8", errors="replace"))
    draw(curve, levels, args.output)
    print(f"\nloss curve: {args.output}")


if __name__ == "__main__":
    main()
