"""The tensors of test_kinds.py where FSDP2 has sharded them: saved with the values that they have, or refused by name.

What torch does not shard, it refuses before anything is saved.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from hf_zero_stream.errors import UnsupportedError
from tests.saving.test_kinds import KNOWN, UNKNOWN, WAYS, Wrapping, odd
from tests.support.checkpoint_files import differing, tensors_of
from tests.support.cluster import run_ranks


REFUSED, NOT_SHARDED = "refused", "torch does not shard it"


def values_of(kind: str, folder: Path) -> dict[str, torch.Tensor]:
    """As stock saves them; of what stock does not save, or whose memory has another value, the values in memory."""
    model = odd({**KNOWN, **UNKNOWN}[kind])
    if kind in KNOWN:
        model.save_pretrained(folder)
        return tensors_of(folder)
    values = {name: it.inner if isinstance(it, Wrapping) else it for name, it in model.state_dict().items()}
    return {name: it.resolve_conj().clone() for name, it in values.items()}


def outcome(kind: str, way: Any, folder: Path) -> str:
    """What becomes of a model with a tensor of this `kind`; "" if it is saved as it is."""
    model = odd({**KNOWN, **UNKNOWN}[kind])
    try:
        fully_shard(model)
    except Exception:
        return NOT_SHARDED
    try:
        found = way(model, folder)
    except UnsupportedError as error:
        dist.barrier()  # rank 0 has removed its draft then
        assert not [path for path in folder.rglob("*") if path.is_file()], (kind, way)
        assert "extra" in str(error) or "Float8" in str(error), (kind, way, str(error))
        return REFUSED
    if dist.get_rank() == 0:
        assert differing(found, values_of(kind, folder.with_name("stock"))) == []
    dist.barrier()
    return ""


def outcomes(kinds: Sequence[str], folder: Path) -> dict[str, list[str]]:
    return {
        kind: [outcome(kind, way, folder / f"{number} {way.__name__}" / "ours") for way in WAYS]
        for number, kind in enumerate(kinds)
    }


@pytest.mark.plugin("stream")
def test_known_under_fsdp2(cluster: None, tmp_path: Path) -> None:
    for found in run_ranks(2, outcomes, list(KNOWN), tmp_path):
        assert {each for of_kind in found.values() for each in of_kind} == {"", NOT_SHARDED}


@pytest.mark.plugin("stream")
def test_unknown_under_fsdp2(cluster: None, tmp_path: Path) -> None:
    """Sharding makes plain memory of some: these are saved; of the others nothing is."""
    for found in run_ranks(2, outcomes, list(UNKNOWN), tmp_path):
        assert all(len({*of_kind}) == 1 for of_kind in found.values()), found
        assert {REFUSED, NOT_SHARDED, ""} == {of_kind[0] for of_kind in found.values()}
