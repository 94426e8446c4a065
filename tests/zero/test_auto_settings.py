"""What "auto", and strings where DeepSpeed takes them, mean in a DeepSpeed config: what they mean to DeepSpeed."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_zero_stream
from hf_zero_stream.errors import ConfigError
from tests.support.cluster import run_ranks
from tests.support.parity import ds_config, load_with
from tests.support.zoo import Checkpoint


BF16, FP32 = torch.bfloat16, torch.float32

OPEN = {**ds_config(), "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
WARNING = '"bf16": {"enabled": "auto"}'

# Whoever fills in "auto" does so later: until then none of them counts. (A few DeepSpeed itself refuses until then.)
IGNORED = {
    **ds_config(torch.bfloat16),
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": "auto",
        "contiguous_gradients": "auto",
        "sub_group_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "zero_hpz_partition_size": "auto",
        "offload_param": {"device": "auto", "buffer_size": "auto"},
        "offload_optimizer": {"device": "auto", "ratio": "auto", "pin_memory": "auto"},
    },
    "aio": {"block_size": "auto"},
    "data_types": {"grad_accum_dtype": "auto"},
    "communication_data_type": "auto",
    "tensor_parallel": {"autotp_size": "auto"},
    "expert_parallel": {"enabled": "auto"},
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
}


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[], int]:
    """How many warnings of an open dtype there were since the last call."""
    monkeypatch.setattr(transformers.utils.logging.get_logger("transformers"), "propagate", True)
    transformers.utils.logging.warning_once.cache_clear()

    def count() -> int:
        found = sum(WARNING in record.getMessage() for record in caplog.records)
        caplog.clear()
        return found

    return count


@pytest.mark.plugin("forecast")
def test_a_plan_takes_an_open_dtype_from_its_argument(zoo_checkpoint: Checkpoint, warnings: Callable[[], int]) -> None:
    folder = str(zoo_checkpoint("llama"))

    def plan(config: dict[str, Any], **kwargs: Any) -> Any:
        return hf_zero_stream.plan(folder, world_size=2, ds_config=config, **kwargs)

    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16"), (torch.float32, "float32")):
        decided = plan(ds_config(dtype))
        assert {target.dtype for target in decided.load.targets} == {dtype}
        assert plan(OPEN, dtype=dtype) == plan(OPEN, dtype=name) == decided
    assert warnings() == 0
    assert plan(OPEN) == plan(ds_config())
    assert warnings() == 1


@pytest.mark.plugin("forecast")
def test_other_settings_that_are_auto_are_not_there(zoo_checkpoint: Checkpoint) -> None:
    folder = str(zoo_checkpoint("qwen3_moe"))
    plan = hf_zero_stream.plan(folder, world_size=2, ds_config=json.loads(json.dumps(IGNORED)))
    assert plan == hf_zero_stream.plan(folder, world_size=2, ds_config=ds_config(torch.bfloat16))
    bucket = {**ds_config(), "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}
    size = transformers.AutoConfig.from_pretrained(folder).hidden_size ** 2
    filled = {**ds_config(), "zero_optimization": {"stage": 3, "reduce_bucket_size": size}}
    plans = [hf_zero_stream.plan(folder, world_size=2, ds_config=config) for config in (bucket, filled)]
    assert plans[0] == plans[1]


@pytest.mark.plugin("forecast")
@pytest.mark.parametrize("stage", ["3", "auto", 0])
def test_a_plan_is_of_stage_1_to_3(zoo_checkpoint: Checkpoint, stage: Any) -> None:
    config = {**ds_config(), "zero_optimization": {"stage": stage}}
    with pytest.raises(ConfigError, match=rf"zero_optimization.stage.*got {stage!r}"):
        hf_zero_stream.plan(str(zoo_checkpoint("llama")), world_size=2, ds_config=config)


def dtypes_of_loads(folder: Path) -> dict[str, Any]:
    """Of what stock and we make of one config; and whether we warn."""
    configs = {
        "auto": OPEN,
        "true": {**ds_config(), "bf16": {"enabled": "true"}},
        "1": {**ds_config(), "fp16": {"enabled": 1}},
        "false": {**ds_config(), "bf16": {"enabled": "false"}},
        "ignored": IGNORED,
    }
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("hf_zero_stream.loading.choice").addHandler(handler)
    found: dict[str, Any] = {}
    for name, config in configs.items():
        for how in ("stock", "streamed"):
            records.clear()
            given = ds_config(torch.bfloat16) if (how, name) == ("stock", "ignored") else config
            given = json.loads(json.dumps(given))
            model = load_with(how, "LlamaForCausalLM", folder, given, {"dtype": torch.float32})
            dtypes = {str(param.dtype) for param in model.parameters()}
            assert all(hasattr(param, "ds_tensor") for param in model.parameters())
            found[f"{name}, {how}"] = dtypes
        found[f"{name}, warns"] = sum(WARNING in record.getMessage() for record in records)
    with pytest.raises(ConfigError, match="zero_optimization.stage: expected a number"):
        load_with("streamed", "LlamaForCausalLM", folder, {"zero_optimization": {"stage": "3"}}, {})
    return found


def test_loads_take_the_dtype_that_deepspeed_takes(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    ranks = run_ranks(2, dtypes_of_loads, zoo_checkpoint("llama"))
    expected = {"auto": "float32", "true": "bfloat16", "1": "float16", "false": "float32", "ignored": "bfloat16"}
    for rank, found in enumerate(ranks):
        for name, dtype in expected.items():
            assert found[f"{name}, stock"] == found[f"{name}, streamed"] == {f"torch.{dtype}"}, name
            assert found[f"{name}, warns"] == (name == "auto" and rank == 0), name
