"""What a folder holds, by the names of its files; nothing is opened."""

from __future__ import annotations

import os
from pathlib import Path


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TORCH_SINGLE = "pytorch_model.bin"
TORCH_INDEX = "pytorch_model.bin.index.json"
WEIGHTS = ((SINGLE, INDEX), (TORCH_SINGLE, TORCH_INDEX))
"""Where the weights are, or what names their files; transformers takes the first that is there."""

OF_TORCH = (".bin", ".pt", ".pth")
OF_VALUES = (".safetensors", *OF_TORCH, ".distcp")
"""What the names of files with tensors end in, in any format; of those in OF_TORCH ``torch.save`` wrote each."""

METADATA = ".metadata"
"""The file of torch.distributed.checkpoint that says what is in its others."""


def distributed_file(folder: Path) -> Path | None:
    """What describes the distributed checkpoint in a folder; None if there is none, or files that go first."""
    return folder / METADATA if os.path.lexists(folder / METADATA) and not has_weights(folder) else None


def has_weights(folder: Path) -> bool:
    """Whether it has files that transformers would load."""
    return any(os.path.lexists(folder / name) for names in WEIGHTS for name in names)


UNFINISHED = ".hf_zero_stream-saving-"
"""How the names begin of folders in which a save writes files before they get their final names."""


def has_unfinished(folder: Path) -> bool:
    """Whether a save into `folder` has died, or goes on."""
    return folder.is_dir() and next(folder.glob(f"{UNFINISHED}*"), None) is not None
