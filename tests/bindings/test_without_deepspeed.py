"""What is not ZeRO works where DeepSpeed is not installed: FSDP2, training states, plans, conversions, the tools."""

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import ROOT, free_port
from tests.support.forks import Forks
from tests.support.zoo import Checkpoint


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Processes of a Python that has all packages that are installed here but DeepSpeed."""
    packages = tmp_path_factory.mktemp("packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(("deepspeed", "__editable__", "hf_zero_stream")):
            (packages / entry.name).symlink_to(entry)
    environment = {"PYTHONPATH": os.pathsep.join([str(packages), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    python = str(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}")  # which sees no other packages
    with Forks("import torch, transformers.modeling_utils", [python], environment) as forks:
        yield forks


SHARDED = """\
import importlib.util, sys, torch
import torch.distributed as dist
import hf_zero_stream
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
assert importlib.util.find_spec("deepspeed") is None
folder, out = sys.argv[1:]
dist.init_process_group("gloo")
plain = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
def train(model, optimizer):
    tokens = torch.arange(8)[None]
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
with hf_zero_stream.streaming():
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=2))
    assert all(torch.equal(param.full_tensor(), plain[name]) for name, param in model.named_parameters())
    assert model.streaming_report.into == "shards"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer)
    hf_zero_stream.save_state(model, f"{out}/state", optimizer=optimizer)
    model.save_pretrained(f"{out}/saved")
    losses = [train(model, optimizer) for _ in range(2)]
    hf_zero_stream.load_state(model, f"{out}/state", optimizer=optimizer)
    assert [train(model, optimizer) for _ in range(2)] == losses
    whole = AutoModelForCausalLM.from_pretrained(f"{out}/saved")
    hf_zero_stream.load_into(whole, folder)
    assert all(torch.equal(param, plain[name]) for name, param in whole.named_parameters())
dist.destroy_process_group()
print("right")
"""


def test_sharded_training(elsewhere: Forks, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    arguments = (str(zoo_checkpoint("llama")), str(tmp_path))
    ranks = [elsewhere.start(SHARDED, *arguments, **group, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]
    assert [rank.printed().count("right") for rank in ranks] == [1, 1]


TOOL = """\
import importlib.util, runpy
assert importlib.util.find_spec("deepspeed") is None
runpy.run_module("hf_zero_stream", run_name="__main__", alter_sys=True)
"""


@pytest.mark.plugin("pickled")
def test_tools(elsewhere: Forks, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = str(zoo_checkpoint("llama"))
    assert "sound" in elsewhere.run(TOOL, "verify", folder)
    elsewhere.run(TOOL, "convert", folder, str(tmp_path / "converted"), "--dtype", "bf16")
    assert (tmp_path / "converted" / "model.safetensors").is_file()
    planned = "hf_zero_stream.plan(sys.argv[1], world_size=2, rank=0, distributed_config={'fsdp_size': 2}).load"
    assert "reads" in elsewhere.run(f"import sys, hf_zero_stream; print('reads', len(list({planned})))", folder)
