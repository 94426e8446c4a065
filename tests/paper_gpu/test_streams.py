"""Weight streams of models on paper GPUs, under NCCL: buckets in device memory, with what a save holds."""

from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero_stream
from tests.paper_gpu.trials import sharded_model, zero_config, zero_model
from tests.support.cluster import PAPER_GPUS, run_ranks
from tests.support.streams import stream_changes


pytestmark = pytest.mark.usefixtures("paper_gpus")


def streamed(checkpoint: Path, folder: Path, home: str, to: str) -> tuple[list[Any], set[str]]:
    """What differs from saves, in three updates of what has changed, and where a whole pass has its buckets."""
    if home == "ZeRO-3":
        model = zero_model(checkpoint, zero_config(3, {}), {})
    else:
        model, _ = sharded_model(checkpoint, {"fsdp_size": 2}, {})
    devices = {bucket.packed.device.type for bucket in hf_zero_stream.weight_stream(model, to)}
    assert {param.device.type for param in model.parameters()} == {"cuda"}
    return stream_changes(model, folder, to, bucket_bytes=20_000), devices


@pytest.mark.plugin("stream")
@pytest.mark.parametrize(
    ("home", "to"),
    [
        ("ZeRO-3", "rank0"),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in (("ZeRO-3", "all"), ("ZeRO-3", "owners"))),
        pytest.param("FSDP2", "rank0", marks=pytest.mark.slow),
    ],
)
def test_streams(even_checkpoint: Path, tmp_path: Path, home: str, to: str) -> None:
    for steps, devices in run_ranks(2, streamed, even_checkpoint, tmp_path, home, to, on=PAPER_GPUS):
        assert [differences for differences, _ in steps] == [[]] * 3
        assert devices == {"cuda"} and torch.version.cuda is None
