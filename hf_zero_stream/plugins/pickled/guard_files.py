"""Guard files beside a training state, for those who meet it with DeepSpeed's own tools, or with accelerate alone.

These look for their own names, and where there are none, an ``assert`` without a text fails, or they go on without an
optimizer. So a guard file has such a name, and makes each rank that reads it raise a sentence. That needs no
hf_zero_stream, and runs nothing:

- of what ``torch.load`` reads, it is an archive without a pickle: one empty entry, whose name is the sentence. torch
  wants folders in an archive, and says in a RuntimeError what it finds instead;
- of the metadata of torch.distributed.checkpoint, which is a bare pickle, it asks for a module of that name.

:mod:`.zero_to_fp32` lies where DeepSpeed puts its script of that name.
"""

from __future__ import annotations

import stat
from pathlib import Path
from zipfile import ZipFile, ZipInfo

import torch.distributed as dist

from ...plugin_api import GUARD, METADATA, ZERO_2_MODEL


_RANKS = 128
"""So many ranks at most have a file of their own at stage 3: rank 0 writes all of them at each save."""

_TEXT = (
    f"{GUARD.decode()}, which DeepSpeed and accelerate alone cannot load: resume inside its streaming() or under "
    "`hf-zero-stream run`, at any number of ranks and any ZeRO stage, without ds_to_universal; its fp32 values as "
    "safetensors: hf-zero-stream convert"
)
"""No full stop, which would part packages' names, and no slash."""


def write(folder: Path, saved: str | int) -> None:
    """Write guard files beside a state in `folder`.

    Args:
        saved: the tag by which DeepSpeed's engine has saved it; or the number of accelerate's model, of FSDP2.
    """
    if isinstance(saved, int):
        metadata = folder / f"pytorch_model_fsdp_{saved}" / METADATA
        metadata.parent.mkdir(exist_ok=True)
        # Protocol 0 of pickle: "c", a module, its attribute, and the end.
        metadata.write_bytes(b"c" + _TEXT.encode() + b"\nsign\n.")
        _write_archive(folder / (f"pytorch_model_fsdp_{saved}.bin" if saved else "pytorch_model_fsdp.bin"))
        return
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    _write_archive(folder / saved / ZERO_2_MODEL)
    _write_archive(folder / saved / "zero_pp_rank_0_mp_rank_00_optim_states.pt")  # what ds_to_universal reads first
    for rank in range(min(ranks, _RANKS)):
        _write_archive(folder / saved / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    script = folder / "zero_to_fp32.py"
    script.write_text(Path(__file__).with_name(script.name).read_text(encoding="utf-8"), encoding="utf-8")
    script.chmod(script.stat().st_mode | stat.S_IEXEC)


def _write_archive(path: Path) -> None:
    with ZipFile(path, "w") as archive:
        archive.writestr(ZipInfo(_TEXT), b"")
