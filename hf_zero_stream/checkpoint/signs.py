"""Signs: files that DeepSpeed opens in a folder of ours that it cannot load, and that tell whoever meets them.

DeepSpeed looks for its own names, and where there are none, an ``assert`` without a text fails. A sign has such a
name. It is a pickle that asks for one name of a module; the module's name is a sentence. So ``torch.load`` raises an
error with that sentence, and runs nothing. That needs no hf_zero_stream.
"""

from __future__ import annotations

import os
from pathlib import Path


__all__ = ["SIGN_NAMES", "is_sign", "remove_signs", "write_signs"]

_RANKS = 8
"""Those of a host, more or less: at stage 3 each rank opens a file of its own."""

SIGN_NAMES = (
    "mp_rank_00_model_states.pt",
    *(f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(_RANKS)),
    "zero_pp_rank_0_mp_rank_00_optim_states.pt",
)

_BEGINNING = b"chf_zero_stream training state"
_SIGN = (
    _BEGINNING
    + b", which DeepSpeed cannot load: go on inside hf_zero_stream's streaming(), at any number of ranks and any ZeRO "
    + b"stage, without ds_to_universal; its fp32 values: the script zero_to_fp32, or hf-zero-stream convert\nsign\n."
)
"""Protocol 0 of pickle: "c", a module, its attribute, and the end. No full stop: it would part packages' names."""


def write_signs(folder: Path) -> None:
    for name in SIGN_NAMES:
        (folder / name).write_bytes(_SIGN)


def is_sign(path: str | os.PathLike[str]) -> bool:
    """Whether the file at `path` has been written by :func:`write_signs`, and not over by DeepSpeed."""
    if os.path.basename(path) not in SIGN_NAMES or not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(len(_BEGINNING)) == _BEGINNING


def remove_signs(folder: Path) -> None:
    """Leave in `folder`, into which DeepSpeed is going to save, nothing that its tools would take for its files."""
    for name in SIGN_NAMES:
        if is_sign(folder / name):
            (folder / name).unlink(missing_ok=True)
