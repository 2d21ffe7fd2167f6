"""Command-line arguments that several programs share."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import torch

from harness.problems import Shape, parse_shape


def make_parser(documentation: str) -> argparse.ArgumentParser:
    """Returns a parser whose help is a program's docstring: a description, "Example:", calls."""
    description, _, example = documentation.partition("Example:")
    return argparse.ArgumentParser(
        description=description,
        epilog=f"example:{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def measuring_parser(documentation: str) -> argparse.ArgumentParser:
    """Returns the parser of a program that measures on a device and may write what it found."""
    parser = make_parser(documentation)
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda or cuda:N (default: cuda if available)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and environment")
    return parser


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """Returns the options, with `device` as a torch.device that is available."""
    options = parser.parse_args(arguments)
    try:
        options.device = find_device(options.device)
    except RuntimeError as error:
        parser.error(str(error))
    return options


def find_device(text: str) -> torch.device:
    """Returns the device of a name.

    Raises:
        RuntimeError: the device does not exist, or the kernels for it are missing.
    """
    from selective_scan import backends

    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise RuntimeError(f"device must be cpu, cuda or cuda:N, got {text!r}")
    device = torch.device(text)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError(f"device {text!r} is not there: this PyTorch finds no CUDA device")
        count = torch.cuda.device_count()
        if device.index is not None and device.index >= count:
            raise RuntimeError(f"device {text!r} is not there: there are {count}")
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(device)
    backend = backends()[device.type]
    if not backend.available:
        raise RuntimeError(f"the kernels for {device.type} are missing: {backend.reason}")
    return device


def count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a count, got {text!r}")
    return int(text)


def positive(text: str) -> int:
    if count(text) == 0:
        raise argparse.ArgumentTypeError("expected at least 1, got 0")
    return int(text)


def shape(text: str) -> Shape:
    try:
        return parse_shape(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
