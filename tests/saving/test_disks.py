"""Output folders that not all ranks see: the folder is whole where rank 0 is, as stock leaves it."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import hf_zero_stream
from tests.saving.test_hooks import with_trainer
from tests.support.cluster import run_ranks
from tests.support.hosts import can_mount, give_own_disk
from tests.support.parity import ds_config, load_with
from tests.support.saving import SHARD_SIZE, different
from tests.support.zoo import Checkpoint


pytestmark = pytest.mark.skipif(not can_mount(), reason="mounting in a namespace of its own is not allowed here")


def save_on_own_disks(checkpoint: Path, folder: Path, others: Path) -> list[list[int]]:
    """Rank 1 has a disk of its own; bytes that each rank wrote, by setting."""
    model = load_with("streamed", "AutoModelForCausalLM", checkpoint, ds_config(), {})
    written = []

    def save(name: str, **kwargs: Any) -> None:
        report = hf_zero_stream.save_pretrained(model, folder / name, max_shard_size=SHARD_SIZE, **kwargs)
        written.append([rank.bytes_written for rank in report.ranks])

    save("shared")
    if dist.get_rank() == 1:
        give_own_disk(folder)
    save("auto")
    with hf_zero_stream.streaming():
        model.save_pretrained(folder / "streaming", max_shard_size=SHARD_SIZE)
    with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(write_from="all")):
        with pytest.raises(hf_zero_stream.errors.SaveError, match='write_from="rank0"'):
            save("error")
    # Rank 0's setting counts.
    os.environ["HF_ZERO_STREAM_WRITE_FROM"] = "rank0" if dist.get_rank() == 0 else "all"
    save("set by rank 0")
    if dist.get_rank() == 1:
        assert os.listdir(folder) == []
        folder = others
    os.environ["HF_ZERO_STREAM_WRITE_FROM"] = "auto"
    save("another path")
    return written


def test_ranks_that_do_not_see_the_folder(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    found = run_ranks(2, save_on_own_disks, zoo_checkpoint("qwen3_moe"), folder, tmp_path / "others")
    shared, *of_rank_0 = found[0]
    assert min(shared) > 0 and [written[1] for written in of_rank_0[:2]] == [0, 0]
    for name in ("auto", "streaming", "set by rank 0", "another path"):
        assert different(folder / name, folder / "shared") == [], name
    assert list((folder / "error").iterdir()) == []


def train_on_own_disks(checkpoint: Path, folder: Path, name: str) -> dict[str, Any]:
    if dist.get_rank() == 1:
        give_own_disk(folder)
        os.environ["LOCAL_RANK"] = "0"
    return with_trainer(checkpoint, folder, name)


@pytest.mark.slow
def test_trainer(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    for name in ("stock", "ours"):
        folder = tmp_path / name
        folder.mkdir()
        run_ranks(2, train_on_own_disks, zoo_checkpoint("qwen3_moe"), folder, name)
    for part in ("final", "run/checkpoint-2"):
        ours, stock = (tmp_path / name / name / part for name in ("ours", "stock"))
        assert set(different(ours, stock)) <= {"training_args.bin", "trainer_state.json"}
        assert (ours / "model.safetensors").exists()
