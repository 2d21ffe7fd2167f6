"""Reads checkpoints from folders or Hugging Face's hub; the names are those of mamba_ssm's hf
module."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "pytorch_model.bin"


def _find(model_name: str | os.PathLike[str], file_name: str) -> Path:
    """Returns the file's path in a folder, or in the hub's cache after downloading it."""
    folder = Path(model_name)
    if folder.is_dir():
        if not (path := folder / file_name).is_file():
            raise FileNotFoundError(f"selective_scan: the folder {folder} has no {file_name}")
        return path
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise ImportError(
            f"selective_scan: model_name must be a folder where the package huggingface_hub is not "
            f"installed, got {str(model_name)!r}"
        ) from error
    return Path(hf_hub_download(str(model_name), file_name))


def load_config_hf(model_name: str | os.PathLike[str]) -> dict[str, Any]:
    """Loads the configuration of a checkpoint.

    Args:
        model_name: a folder, or a name on the hub, for which huggingface_hub must be installed.

    Raises:
        FileNotFoundError: the folder contains no configuration.
        ImportError: the folder does not exist, and huggingface_hub is not installed.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from selective_scan.compat.hf import load_config_hf
        >>> with TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "config.json").write_text('{"d_model": 768}')
        ...     load_config_hf(folder)
        {'d_model': 768}
    """
    return json.loads(_find(model_name, CONFIG_NAME).read_text(encoding="utf-8"))


def load_state_dict_hf(
    model_name: str | os.PathLike[str],
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Loads the weights of a checkpoint.

    Args:
        model_name: see :func:`load_config_hf`.
        device: the weights' device; None leaves them on the CPU.
        dtype: the weights' dtype; None keeps the saved one.

    Raises:
        FileNotFoundError: the folder contains no weights.
        ImportError: the folder does not exist, and huggingface_hub is not installed.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import torch
        >>> from selective_scan.compat.hf import load_state_dict_hf
        >>> with TemporaryDirectory() as folder:
        ...     torch.save({"weight": torch.ones(2)}, f"{folder}/pytorch_model.bin")
        ...     load_state_dict_hf(folder, dtype=torch.float16)
        {'weight': tensor([1., 1.], dtype=torch.float16)}
    """
    # Weights are converted before they are moved, so that the device holds one copy of each.
    weights = torch.load(_find(model_name, WEIGHTS_NAME), map_location="cpu", weights_only=True)
    return {name: weight.to(dtype=dtype).to(device=device) for name, weight in weights.items()}
