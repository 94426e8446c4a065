"""The tensors in files of checkpoints: read and written by safetensors' own functions, and compared."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


Tensors = dict[str, torch.Tensor]
"""By name, as in a state dict."""


def tensors_of(folder: Path | str, pattern: str = "*.safetensors") -> Tensors:
    """All tensors of the files in `folder` whose names have this pattern."""
    return {name: it for path in sorted(Path(folder).glob(pattern)) for name, it in load_file(path).items()}


def write(tensors: Tensors, folder: Path) -> None:
    """Write the only shard of a checkpoint."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def rewritten(source: Path, folder: Path, change: Callable[[Tensors], None] = lambda tensors: None) -> Path:
    """A copy of a checkpoint, in one shard, with tensors changed in place; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = tensors_of(source)
    change(tensors)
    for path in folder.glob("model*"):
        path.unlink()
    write(tensors, folder)
    if source != folder:
        shutil.copy(source / "config.json", folder)
    return folder


def add_one(folder: Path) -> None:
    """Other values in every tensor of a checkpoint, under the same headers."""
    for path in folder.glob("*.safetensors"):
        save_file({name: value + 1 for name, value in load_file(path).items()}, path, metadata={"format": "pt"})


def differing(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of which only one of two has a tensor, or with other bits, dtype or shape."""
    both = found.keys() & expected.keys()
    return sorted((found.keys() ^ expected.keys()) | {it for it in both if not same_bits(found[it], expected[it])})


def same_bits(mine: torch.Tensor, expected: torch.Tensor) -> bool:
    if mine.shape != expected.shape or mine.dtype != expected.dtype:
        return False
    return torch.equal(*(tensor.detach().cpu().reshape(-1).view(torch.uint8) for tensor in (mine, expected)))
