"""Trains a byte-level model on long documents, whose sequences are split over several processes.

The text is the source code of the Python standard library, one file after another: nothing is
downloaded. Each process has a part of the steps of every sequence, on a CPU core with gloo or on a
GPU with NCCL. If the program was killed, calling it again continues from its last checkpoint:

    torchrun --standalone --nproc-per-node 2 examples/train_long.py
    torchrun --standalone --nproc-per-node 2 examples/train_long.py --check --steps 5
    torchrun --standalone --nproc-per-node 8 examples/train_long.py --seqlen 1048576 --d-model 512
"""

import argparse
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from selective_scan import S6
from selective_scan.distributed import parallelize


class ByteModel(nn.Module):
    """Predicts the byte after each byte."""

    def __init__(self, d_model: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, d_model)
        self.s6 = S6(d_model, depth=depth)
        self.head = nn.Linear(d_model, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (batch, seqlen), a rank's own steps. Returns logits: (batch, seqlen, 256)."""
        return self.head(self.s6(self.embedding(tokens)))


def load_text() -> torch.Tensor:
    """Returns the bytes of the standard library's modules, in the order of their names."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def draw_batch(text: torch.Tensor, args: argparse.Namespace, step: int) -> torch.Tensor:
    """Returns the tokens of a step, (batch, seqlen + 1), which are the same on every rank and in
    every run."""
    random = torch.Generator().manual_seed(args.seed + step)
    begins = torch.randint(len(text) - args.seqlen, (args.batch_size,), generator=random)
    return torch.stack([text[begin : begin + args.seqlen + 1] for begin in begins])


def make_model(args: argparse.Namespace, device: torch.device) -> ByteModel:
    torch.manual_seed(args.seed)
    return ByteModel(args.d_model, args.depth).to(device)


class Training:
    """A model, its optimizer, and the number of steps taken.

    Args:
        args: the program's arguments.
        model: the result of `make_model`, possibly parallelized.
        device: the model's device.
        rank, ranks: the part of a sequence that this process has, and the number of parts.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        model: nn.Module,
        device: torch.device,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.args, self.model, self.device = args, model, device
        self.rank, self.ranks = rank, ranks
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
        self.step = 0

    def take_step(self, text: torch.Tensor) -> float:
        """Takes a training step; returns the loss over all steps of the sequences before it."""
        batch = draw_batch(text, self.args, self.step).to(self.device)
        tokens, targets = (
            part.tensor_split(self.ranks, dim=1)[self.rank]
            for part in (batch[:, :-1], batch[:, 1:])
        )
        logits = self.model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss = loss / (self.args.batch_size * self.args.seqlen)
        self.optimizer.zero_grad()
        (self.ranks * loss).backward()  # DistributedDataParallel averages over the ranks
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        total = loss.detach()
        if self.ranks > 1:
            dist.all_reduce(total)
        return total.item()

    def save(self, path: Path) -> None:
        """Saves a checkpoint atomically: if the process is killed, the previous one remains."""
        if self.rank > 0:
            return
        unfinished = path.with_suffix(".unfinished")
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(state, unfinished)
        unfinished.replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device)
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def train(training: Training, text: torch.Tensor) -> list[float]:
    """Takes the remaining steps and returns their losses."""
    args, losses = training.args, []
    tokens = args.batch_size * args.seqlen
    hide = training.rank > 0
    with tqdm(total=args.steps, initial=training.step, unit="step", disable=hide) as progress:
        while training.step < args.steps:
            start = time.perf_counter()
            losses.append(training.take_step(text))
            speed = tokens / (time.perf_counter() - start)
            progress.set_postfix(loss=f"{losses[-1]:.4g}", tokens_per_s=f"{speed:.3g}")
            progress.update()
            if args.checkpoint and training.step % args.save_every == 0:
                training.save(args.checkpoint)
    return losses


def compare(losses: list[float], args: argparse.Namespace, text: torch.Tensor, device) -> None:
    """Prints the losses next to those of one process with whole sequences; fails if they differ."""
    alone = train(Training(args, make_model(args, device), device), text)
    print("step  all ranks  one rank")
    for step, (ours, theirs) in enumerate(zip(losses, alone, strict=True), 1):
        print(f"{step:4}  {ours:9.6f}  {theirs:8.6f}")
        if abs(ours - theirs) > 1e-3 * theirs:
            raise SystemExit(f"the losses of step {step} differ")
    print("the same")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level S6 on sequences that are split over processes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seqlen", type=int, default=8192, help="length of a whole sequence")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--d-model", type=int, default=64, help="width of the model")
    parser.add_argument("--depth", type=int, default=2, help="number of S6 layers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="file to resume from")
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument(
        "--check", action="store_true", help="compare losses with those of one process"
    )
    args = parser.parse_args()
    for name in ("seqlen", "batch_size", "steps", "d_model", "depth", "save_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.check and args.checkpoint:
        parser.error("--check begins anew; leave out --checkpoint")
    return args


def main() -> None:
    args = parse_arguments()
    backend = "nccl" if args.device == "cuda" else "gloo"
    if "RANK" in os.environ:  # started by torchrun
        device = torch.device(args.device, int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(backend)
    else:
        device = torch.device(args.device, 0)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if args.device == "cuda":
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1 if ranks > 1 else torch.get_num_threads())

    text = load_text()
    model = make_model(args, device)
    mesh = dist.init_device_mesh(args.device, (ranks,), mesh_dim_names=("sequence",))
    parallelize(model.s6, mesh, sequence_dim="sequence")
    training = Training(args, DistributedDataParallel(model), device, rank, ranks)
    if args.checkpoint and args.checkpoint.exists():
        training.load(args.checkpoint)
        if rank == 0:
            print(f"going on behind step {training.step}")
    losses = train(training, text)
    if rank == 0 and losses:
        print(
            f"{ranks} ranks, {len(text)} bytes of text, loss of step {args.steps}: {losses[-1]:.6f}"
        )
        if args.check:
            compare(losses, args, text, device)
    dist.barrier()
    # If DistributedDataParallel held the last reference to the group, its destruction could wait
    # for gloo's threads while these wait for the interpreter.
    del training
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
