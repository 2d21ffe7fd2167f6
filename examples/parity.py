"""Trains two S6 models on the parity of 64 bits: one with real states, one with rotating states.

A decaying state cannot distinguish an even number of events from an odd one, however long it
trains; a state that turns by π at each event can. The models differ only in `rotary`, which also
brings the norms and biases of B and C; with the trapezoid both have these. They see the same bits,
at first a few at a time. One call takes less than a minute on two CPU cores:

    python examples/parity.py
    python examples/parity.py --trapezoid
"""

import argparse
import time

import torch
from matplotlib.figure import Figure
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

from selective_scan import S6


class ParityModel(nn.Module):
    """One layer of S6 that predicts after each bit whether the number of ones so far is odd."""

    def __init__(self, d_model: int, rotary: bool, trapezoid: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2, d_model)
        # An angle is at most π times a step size, so step sizes should be about 1.
        self.s6 = S6(
            d_model,
            d_state=8,
            dt_min=0.1,
            dt_max=1.0,
            discretization_method="trapezoid" if trapezoid else "zoh",
            rotary=rotary,
        )
        self.head = nn.Linear(d_model, 2)

    def forward(self, bits: torch.Tensor) -> torch.Tensor:
        """bits: (batch, seqlen). Returns logits: (batch, seqlen, 2)."""
        return self.head(self.s6(self.embedding(bits)))


def draw_bits(batch: int, seqlen: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns random bits, (batch, seqlen), and the parities up to each of them."""
    bits = torch.randint(2, (batch, seqlen)).to(device)
    return bits, bits.cumsum(1) % 2


@torch.no_grad()
def measure(model: nn.Module, bits: torch.Tensor, parities: torch.Tensor) -> float:
    """Returns the fraction of sequences whose overall parity is predicted correctly."""
    return (model(bits)[:, -1].argmax(-1) == parities[:, -1]).double().mean().item()


def train(rotary: bool, args: argparse.Namespace) -> tuple[list[int], list[float]]:
    """Trains a model; returns step numbers, and the accuracies after them on separate test
    sequences."""
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    test = draw_bits(args.test_size, args.bits, device)
    model = ParityModel(args.d_model, rotary, args.trapezoid).to(device)
    torch.manual_seed(args.seed + 1)  # both models see the same bits, whatever they drew before
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps)
    name = "states that rotate" if rotary else "real states"
    steps, accuracies = [0], [measure(model, *test)]
    with tqdm(total=args.steps, desc=name, unit="step") as progress:
        for step in range(1, args.steps + 1):
            # The sequences grow to the full length during the first 60 % of the steps.
            seqlen = min(args.bits, 2 + int(args.bits * step / (0.6 * args.steps)))
            bits, parities = draw_bits(args.batch_size, seqlen, device)
            loss = F.cross_entropy(model(bits).flatten(0, 1), parities.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if step % args.measure_every == 0 or step == args.steps:
                steps.append(step)
                accuracies.append(measure(model, *test))
                progress.set_postfix(loss=f"{loss.item():.3g}", accuracy=f"{accuracies[-1]:.1%}")
            progress.update()
    return steps, accuracies


def draw(curves: dict[str, tuple[list[int], list[float]]], bits: int, path: str) -> None:
    """Saves the two curves of accuracy in one picture."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.subplots()
    for name, (steps, accuracies) in curves.items():
        axis.plot(steps, accuracies, label=name)
    axis.axhline(0.5, color="gray", linestyle=":", label="chance")
    axis.set(xlabel="step", ylabel="accuracy", ylim=(0, 1.05), title=f"parity of {bits} bits")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train S6 models with real and with rotating states on the parity of bits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 ...")
    parser.add_argument("--bits", type=int, default=64, help="sequence length")
    parser.add_argument("--trapezoid", action="store_true", help="use this method instead of zoh")
    parser.add_argument("--steps", type=int, default=800, help="training steps of each model")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--test-size", type=int, default=1000, help="number of sequences")
    parser.add_argument("--measure-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--lr", type=float, default=1e-2, help="largest learning rate")
    parser.add_argument("--d-model", type=int, default=16, help="width of the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="parity.png", help="file for the picture")
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch sees no CUDA device")
    for name in ("bits", "steps", "batch_size", "test_size", "measure_every", "d_model"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return args


def main() -> None:
    args = parse_arguments()
    start = time.perf_counter()
    curves = {
        "real states": train(False, args),
        "states that rotate": train(True, args),
    }
    print(f"trained both on {args.device} in {time.perf_counter() - start:.0f} s")
    draw(curves, args.bits, args.output)
    print(f"curves: {args.output}")
    print(f"accuracy on the parity of {args.bits} bits:")
    for name, (_, accuracies) in curves.items():
        print(f"  {name:<18}  {accuracies[-1]:6.1%}")


if __name__ == "__main__":
    main()
