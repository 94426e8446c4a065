"""``HF_ZERO_STREAM_DISABLE``: everything is stock's, in ``streaming()``, under the prefix, in our own classes."""

from pathlib import Path

import pytest

import hf_zero_stream
from hf_zero_stream.errors import ConfigError
from hf_zero_stream.settings.config import DISABLE
from tests.support.commands import run_command
from tests.support.zoo import Checkpoint


SCRIPT = """\
import inspect
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import optimizer
from transformers import AutoModelForCausalLM, PreTrainedModel
import hf_zero_stream
from hf_zero_stream import errors

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def bent():
    owners = PreTrainedModel, AutoModelForCausalLM, dist.distributed_c10d
    return [vars(owner).copy() for owner in owners], sys.meta_path.copy(), len(optimizer._global_optimizer_post_hooks)

before = bent()
assert not hasattr(PreTrainedModel.from_pretrained, "__wrapped__") and before[2] == 0
with hf_zero_stream.streaming():
    assert bent() == before
    model = AutoModelForCausalLM.from_pretrained("checkpoint")
    hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained("checkpoint")

@hf_zero_stream.streaming()
def load():
    assert bent() == before
load()

def sharded(model):
    mesh = dist.init_device_mesh("cpu", (1,))
    weight = model.get_input_embeddings().weight
    model.get_input_embeddings().weight = torch.nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)]))
    return model

hf_zero_stream.save_pretrained(model, "ours")
model.save_pretrained("stock")
assert Path("ours/model.safetensors").read_bytes() == Path("stock/model.safetensors").read_bytes()
for call in (
    lambda: hf_zero_stream.save_state(model, "state"),
    lambda: hf_zero_stream.HostStates("state"),
    lambda: hf_zero_stream.save_pretrained(model, "cast", dtype=torch.float32),
    lambda: hf_zero_stream.save_pretrained(sharded(model), "sharded"),
):
    try:
        call()
    except errors.ConfigError as error:
        print(error)
assert bent() == before and not hasattr(model, "streaming_report")
written = [name for name in ("state", "cast", "sharded") if Path(name).exists()]
print("written:", written, hf_zero_stream.streaming.__name__)
"""


def test_all_is_stocks(zoo_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is replaced; what has no equal in stock says so; and one line says that we are off."""
    for name, value in {DISABLE: "1", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "checkpoint").symlink_to(zoo_checkpoint("llama"))
    (tmp_path / "script.py").write_text(SCRIPT)
    printed = run_command("hf-zero-stream run python script.py", tmp_path)
    assert printed.count("HF_ZERO_STREAM_DISABLE is set: loads and saves are left to transformers") == 1
    refused = [line for line in printed.splitlines() if line.startswith("hf_zero_stream.")]
    assert [line.partition(":")[0].removeprefix("hf_zero_stream.") for line in refused] == [
        *("save_state", "HostStates", "save_pretrained", "save_pretrained")
    ]
    assert "takes no dtype" in refused[2] and "no rank holds all of this LlamaForCausalLM" in refused[3]
    assert "written: [] streaming\n" in printed


def test_a_value_that_is_no_boolean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DISABLE, "off")
    with pytest.raises(ConfigError, match=f"{DISABLE}: expected a boolean .*; got 'off'"):
        hf_zero_stream.streaming().__enter__()
