"""Signs: files that DeepSpeed opens in a folder of ours that it cannot load, and that tell whoever meets them.

DeepSpeed looks for its own names, and where there are none, an ``assert`` without a text fails. A sign has such a
name. It is a pickle that asks for one name of a module; the module's name is a sentence. So ``torch.load`` raises an
error with that sentence, and runs nothing. That needs no hf_zero_stream.
"""

from __future__ import annotations

import os
from pathlib import Path


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
