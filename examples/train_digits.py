"""Trains an S6 classifier on handwritten digits, read as sequences of 64 pixels.

The data are the 1797 digits of 8 x 8 pixels that scikit-learn includes (UCI "Optical Recognition of
Handwritten Digits"): nothing is downloaded. One call takes about two minutes on two CPU cores:

    python examples/train_digits.py
    python examples/train_digits.py --device cuda --epochs 100 --graphs
"""

import argparse
import time

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

from selective_scan import S6


class DigitClassifier(nn.Module):
    """Classifies a sequence of pixels: position embeddings, S6 layers, and a head on the mean."""

    def __init__(self, d_model: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(1, d_model)
        self.position = nn.Parameter(0.02 * torch.randn(64, d_model))
        self.s6 = S6(d_model, depth=depth)
        self.head = nn.Linear(d_model, 10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """pixels: (batch, 64), each between 0 and 1. Returns logits: (batch, 10)."""
        hidden = self.s6(self.embedding(pixels.unsqueeze(-1)) + self.position)
        return self.head(hidden.mean(dim=1))


def load_data(seed: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Returns training and test pixels, training and test labels; a fifth is for testing."""
    pixels, labels = load_digits(return_X_y=True)
    parts = train_test_split(pixels / 16, labels, test_size=0.2, stratify=labels, random_state=seed)
    train_x, test_x, train_y, test_y = (torch.from_numpy(part).to(device) for part in parts)
    return train_x.float(), test_x.float(), train_y, test_y


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Returns an optimizer's parameter groups. Parameters with the mark of S6's poles and skips do
    not decay."""
    decaying, others = [], []
    for parameter in model.parameters():
        is_marked = getattr(parameter, "_no_weight_decay", False)
        (others if is_marked else decaying).append(parameter)
    return [
        {"params": decaying, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def train(
    model: nn.Module, pixels: torch.Tensor, labels: torch.Tensor, args: argparse.Namespace
) -> list[float]:
    """Trains in place and returns the loss of every step."""
    batch_size = min(args.batch_size, len(labels))
    steps_per_epoch = len(labels) // batch_size
    steps = args.epochs * steps_per_epoch
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.01), lr=args.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, total_steps=steps)
    if args.graphs:  # a model so small waits for the host, which graphs spare
        model = torch.cuda.make_graphed_callables(model, (pixels[:batch_size],))
    losses = []
    with tqdm(total=steps, unit="step") as progress:
        for epoch in range(args.epochs):
            progress.set_description(f"epoch {epoch + 1}/{args.epochs}")
            order = torch.randperm(len(labels), device=labels.device)
            for batch in order.split(batch_size)[:steps_per_epoch]:
                loss = F.cross_entropy(model(pixels[batch]), labels[batch])
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                losses.append(loss.item())
                progress.set_postfix(loss=f"{losses[-1]:.2g}")
                progress.update()
    return losses


@torch.no_grad()
def classify(model: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    model.eval()
    return model(pixels).argmax(dim=1)


def draw(
    losses: list[float],
    pixels: torch.Tensor,
    labels: torch.Tensor,
    predictions: torch.Tensor,
    accuracy: float,
    path: str,
) -> None:
    """Saves the loss curve and 20 test digits; the misclassified ones come first, in red."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.1, 1))

    axis = left.subplots()
    axis.plot(losses, linewidth=0.8)
    axis.set(xlabel="step", ylabel="cross entropy", yscale="log", title="training loss")
    axis.grid(alpha=0.3)

    right.suptitle(f"test digits, {accuracy:.1%} right")
    wrong_first = torch.argsort((predictions == labels).int(), stable=True)[:20].tolist()
    for axis, index in zip(right.subplots(4, 5).flat, wrong_first, strict=True):
        prediction, label = int(predictions[index]), int(labels[index])
        axis.imshow(pixels[index].view(8, 8).cpu(), cmap="gray_r")
        axis.set_axis_off()
        if prediction == label:
            axis.set_title(f"{prediction}", fontsize=10)
        else:
            axis.set_title(f"{prediction}, not {label}", fontsize=10, color="tab:red")
    figure.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train an S6 classifier on scikit-learn's handwritten digits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 ...")
    parser.add_argument("--graphs", action="store_true", help="run the model as CUDA graphs")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-2, help="largest learning rate")
    parser.add_argument("--d-model", type=int, default=64, help="width of the model")
    parser.add_argument("--depth", type=int, default=2, help="number of S6 layers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="digits.png", help="file for the picture")
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch sees no CUDA device")
    if args.graphs and not args.device.startswith("cuda"):
        parser.error(f"--graphs needs --device cuda, got --device {args.device}")
    for name in ("epochs", "batch_size", "d_model", "depth"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return args


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    train_x, test_x, train_y, test_y = load_data(args.seed, device)
    model = DigitClassifier(args.d_model, args.depth).to(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(train_y)} digits to learn, {len(test_y)} to test, {parameters} parameters")

    start = time.perf_counter()
    losses = train(model, train_x, train_y, args)
    print(f"trained on {device} in {time.perf_counter() - start:.0f} s")

    predictions = classify(model, test_x)
    accuracy = (predictions == test_y).double().mean().item()
    print(f"test accuracy: {accuracy:.1%}")
    draw(losses, test_x, test_y, predictions, accuracy, args.output)
    print(f"loss curve and classified digits: {args.output}")


if __name__ == "__main__":
    main()
