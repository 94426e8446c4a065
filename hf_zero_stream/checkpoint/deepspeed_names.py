"""The files of DeepSpeed in a folder, by their names; and signs, which are files of such names.

DeepSpeed looks for its own names, and in a folder of ours, where there are none, an ``assert`` without a text fails.
So a sign has such a name, and tells whoever meets it. It is a pickle that asks for one name of a module; the module's
name is a sentence. So ``torch.load`` raises an error with that sentence, and runs nothing. That needs no
hf_zero_stream.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import ReadError
from .formats import has_weights


ZERO_2_MODEL = "mp_rank_00_model_states.pt"
"""The file of the model's states at stages 1 and 2; at stage 3 each rank has its own."""

OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,9})_mp_rank_(\d{1,9})_optim_states\.pt")
_OF_DEEPSPEED = re.compile(r".*_(model|optim)_states\.pt")
"""What any checkpoint of DeepSpeed consists of, also one without ZeRO."""

SWAPPED = "offloaded_tensors"
"""The folder in which DeepSpeed puts copies of the optimizer's swap files (NVMe)."""

_OF_ALL = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")
_OF_RANK = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
"""At stage 3 each rank opens a file of its own."""

_AT_LEAST = 8
"""As many ranks as a host has, more or less, find a sign also where fewer have saved."""

_BEGINNING = b"chf_zero_stream training state"
_SIGN = (
    _BEGINNING
    + b", which DeepSpeed cannot load: go on inside hf_zero_stream's streaming(), at any number of ranks and any ZeRO "
    + b"stage, without ds_to_universal; its fp32 values: the script zero_to_fp32, or hf-zero-stream convert\nsign\n."
)
"""Protocol 0 of pickle: "c", a module, its attribute, and the end. No full stop: it would part packages' names."""


def write_signs(folder: Path, world_size: int) -> None:
    """Put signs into `folder` for that many ranks, which have saved there."""
    for name in (*_OF_ALL, *(_OF_RANK.format(rank) for rank in range(max(world_size, _AT_LEAST)))):
        (folder / name).write_bytes(_SIGN)


def is_sign(path: str | os.PathLike[str]) -> bool:
    """Whether the file at `path` has been written by :func:`write_signs`, and not over by DeepSpeed."""
    if not os.fspath(path).endswith("_states.pt") or not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(len(_BEGINNING)) == _BEGINNING


def remove_signs(folder: Path) -> None:
    """Leave in `folder`, into which DeepSpeed is going to save, nothing that its tools would take for its files."""
    for path in folder.glob("*_states.pt"):
        if is_sign(path):
            path.unlink(missing_ok=True)


def entries_of_deepspeed(folder: str | os.PathLike[str]) -> list[str]:
    """The names of what ``save_checkpoint`` of DeepSpeed has put into the folder of a tag; none if it has not."""
    names = names_in(folder)
    has_any = any(map(_OF_DEEPSPEED.fullmatch, names))
    return [name for name in names if _OF_DEEPSPEED.fullmatch(name) or name == SWAPPED] if has_any else []


def world_size_of(folder: str | os.PathLike[str]) -> int:
    """How many files of optimizers' states of ZeRO there are."""
    return sum(1 for name in names_in(folder) if OPTIMIZER.fullmatch(name))


def model_parallel_size_of(folder: str | os.PathLike[str]) -> int:
    """How many ranks of model parallelism have files there; 0 without ZeRO."""
    found = map(OPTIMIZER.fullmatch, names_in(folder))
    return len({match[2] for match in found if match})


def names_in(folder: str | os.PathLike[str]) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if not is_sign(os.path.join(folder, name)))
    except (NotADirectoryError, FileNotFoundError):
        return []
    except OSError as error:
        raise ReadError(f"{os.fspath(folder)}: cannot list the folder: {error.strerror or error}.") from error


def zero_folder_of(path: Path) -> Path | None:
    """The folder of the ZeRO checkpoint in `path`, or `path` itself; None if it is or holds another kind."""
    if not path.is_dir() or has_weights(path):
        return None
    if world_size_of(path):
        return path
    latest = path / "latest"
    name = latest.read_text(encoding="utf-8", errors="replace").strip() if latest.is_file() else ""
    is_name = bool(name) and Path(name).name == name and "\0" not in name
    return path / name if is_name and world_size_of(path / name) else None
