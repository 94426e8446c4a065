"""The files of DeepSpeed in a folder, by their names; and guard files, which are ours and have such names.

A plug-in writes guard files beside training states, for those who meet these with others' own tools.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import ReadError
from .index import has_weights


ZERO_2_MODEL = "mp_rank_00_model_states.pt"
"""The file of the model's states at stages 1 and 2; at stage 3 each rank has its own."""

OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,9})_mp_rank_(\d{1,9})_optim_states\.pt")
_STATES_FILE = re.compile(r".*_(model|optim)_states\.pt")
"""The files of any checkpoint of DeepSpeed, also of one without ZeRO."""

SWAPPED = "offloaded_tensors"
"""The folder in which DeepSpeed puts copies of the optimizer's swap files (NVMe)."""

GUARD = b"hf_zero_stream training state"
"""What stands in the first bytes of a guard file, and of no other."""

_GUARDED = ("*_states.pt", "pytorch_model_fsdp*.bin", "pytorch_model_fsdp_*/.metadata")


def is_guard_file(path: str | os.PathLike[str]) -> bool:
    """Whether the file at `path` is a guard file, and nobody has written over it."""
    if not os.fspath(path).endswith(("_states.pt", ".bin", ".metadata")) or not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return GUARD in file.read(30 + len(GUARD))  # behind the header of an archive's first entry


def remove_guard_files(folder: Path) -> None:
    """Remove guard files from `folder`, where DeepSpeed or accelerate saves: their tools take them for their own."""
    for path in [path for pattern in _GUARDED for path in folder.glob(pattern)]:
        if is_guard_file(path):
            path.unlink(missing_ok=True)


def entries_of_deepspeed(folder: str | os.PathLike[str]) -> list[str]:
    """The names of files and folders of DeepSpeed's ``save_checkpoint`` in the folder of a tag; none without one."""
    names = names_in(folder)
    has_any = any(map(_STATES_FILE.fullmatch, names))
    return [name for name in names if _STATES_FILE.fullmatch(name) or name == SWAPPED] if has_any else []


def world_size_of(folder: str | os.PathLike[str]) -> int:
    """The number of files with ZeRO's optimizer states."""
    return sum(1 for name in names_in(folder) if OPTIMIZER.fullmatch(name))


def model_parallel_size_of(folder: str | os.PathLike[str]) -> int:
    """The number of ranks of model parallelism that have files there; 0 without ZeRO."""
    found = map(OPTIMIZER.fullmatch, names_in(folder))
    return len({match[2] for match in found if match})


def names_in(folder: str | os.PathLike[str]) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if not is_guard_file(os.path.join(folder, name)))
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
