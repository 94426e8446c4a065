"""A weight stream in the shape of vLLM's WeightSource: what it says, and what it gives, on all ranks."""

import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

import hf_zero_stream
from tests.support.checkpoint_files import differing
from tests.support.cluster import ROOT, run_ranks
from tests.support.live_sharded import fully_sharded
from tests.support.parity import ds_config
from tests.support.rl_trainers import put
from tests.support.vllm_sources import ParamMeta, Source32, Source33
from tests.support.zoo import Checkpoint


def given(folder: Path, shape: Any, to: str) -> list[str]:
    """What two passes over a source give otherwise than it says, or than a pass over the stream gives."""
    put("vllm")
    put(
        "vllm.distributed",
        weight_transfer=put("vllm.distributed.weight_transfer", ParamMeta=ParamMeta, WeightSource=shape),
    )
    with hf_zero_stream.streaming():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, ds_config=ds_config(torch.float32))
    stream: Any = hf_zero_stream.weight_stream(model, to, bucket_bytes=20_000)  # type: ignore[arg-type]
    source = stream.weight_source()
    rank = dist.get_rank()
    if shape is Source33:
        assert source.metadata is source.metadata
        said, owned = source.metadata, source.owned_names(rank)
    else:
        said = source.metadata()
        owned = [each.name for each in said] if to == "all" or rank == 0 else []
    wrong = []
    for _ in range(2):
        found = list(source.iter_full() if shape is Source33 else source)
        mine = [ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in found]
        stated = [ParamMeta(each.name, each.dtype, each.shape) for each in said if each.name in owned]
        assert mine == stated and [name for name, _ in found] == owned
        wrong += differing(dict(found), {name: tensor for bucket in stream for name, tensor in bucket})
    assert len(owned) > 5 or (to, rank) == ("rank0", 1)
    return wrong


@pytest.mark.sample(4)
@pytest.mark.parametrize("to", ["rank0", "all"])
@pytest.mark.parametrize("shape", [Source32, Source33])
def test_it_gives_what_it_says(cluster: None, zoo_checkpoint: Checkpoint, shape: type[Any], to: str) -> None:
    assert run_ranks(2, given, zoo_checkpoint("qwen3_moe"), shape, to) == [[], []]


def refused(folder: Path) -> str:
    stream = hf_zero_stream.weight_stream(fully_sharded(folder), "owners")
    with pytest.raises(hf_zero_stream.errors.ConfigError) as caught:
        stream.weight_source()
    return str(caught.value)


def test_owners(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    for message in run_ranks(2, refused, zoo_checkpoint("llama")):
        assert "expected a stream to 'rank0' or 'all'; got to='owners'" in message


@pytest.mark.slow
def test_vllms_own_engine(vllm: str, zoo_checkpoint: Checkpoint) -> None:
    """It sends the same from our source as from its own, which gathers."""
    torchrun = [
        str(Path(vllm).with_name("python")),
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]
    command = [
        *torchrun,
        "-m",
        "tests.support.vllm_sources",
        str(zoo_checkpoint("llama")),
        sysconfig.get_path("purelib"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "rank 0: 42 equal tensors" in done.stdout and "rank 1: 0 equal tensors" in done.stdout, done.stdout
