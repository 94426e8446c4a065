"""States in the folders of hosts: any hosts that have all pieces go on, with the bits of a state on a shared disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.cluster import run_ranks
from tests.support.hosts import can_mount
from tests.support.simulated_hosts import join_host
from tests.support.training_state import engine_of, state_config, train, two_groups


pytestmark = pytest.mark.skipif(not can_mount(), reason="mounting in a namespace of its own is not allowed here")

Checkpoint = Callable[..., Path]


def train_and_save(checkpoint: Path, disks: Path, folder: Path, hosts: Sequence[str], stage: int, copies: int) -> Any:
    """Save after 2 steps and after 4, on hosts; and on a shared disk."""
    import hf_zero_stream

    join_host(hosts, disks, folder)
    engine = engine_of(checkpoint, state_config(stage), two_groups)
    losses = train(engine, range(2))
    hf_zero_stream.save_state(engine, folder, hosts=True, copies=copies, data={"position": 7})
    losses += train(engine, range(2, 4))
    hf_zero_stream.save_state(engine, folder, hosts=True, copies=copies, keep=2, data={"position": 8})
    hf_zero_stream.save_state(engine, disks.parent / "shared")
    return losses + train(engine, range(4, 6))


def resume(checkpoint: Path, disks: Path, folder: Path, hosts: Sequence[str], stage: int) -> dict[str, Any]:
    """The losses of two steps, from what hosts have, and from the shared disk."""
    import hf_zero_stream

    join_host(hosts, disks, folder)
    found = {}
    for name in ("hosts", "shared"):
        engine = engine_of(checkpoint, state_config(stage), two_groups)
        if name == "hosts":
            resumed = hf_zero_stream.load_state(engine, folder, hosts=True)
            assert (resumed.tag, resumed.data) == ("global_step4", {"position": 8})
        else:
            hf_zero_stream.load_state(engine, disks.parent / "shared")
        found[name] = train(engine, range(4, 6))
        hf_zero_stream.save_state(engine, disks.parent / f"again {name}")
    dist.barrier()
    return found


@pytest.mark.parametrize("stage", [3, 1])
def test_two_of_three_hosts_go_on(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, stage: int) -> None:
    from tests.support.saving import different

    disks, folder = tmp_path / "disks", tmp_path / "own"
    folder.mkdir()
    checkpoint = zoo_checkpoint("qwen3_moe")
    losses = run_ranks(3, train_and_save, checkpoint, disks, folder, "abc", stage, 1)[0]
    assert len(list((disks / "a").glob("state-*"))) == 2
    shutil.rmtree(disks / "b")
    for hosts in ("ac", "caa", "cad"):
        for found in run_ranks(len(hosts), resume, checkpoint, disks, folder, hosts, stage):
            assert found["hosts"] == found["shared"]
        assert different(tmp_path / "again hosts", tmp_path / "again shared") == []
    assert losses is not None
