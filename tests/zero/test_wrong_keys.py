"""Keys that DeepSpeed's config does not have are named, and the checkpoint is not blamed for them."""

from pathlib import Path
from typing import Any

import pytest
import transformers

import hf_zero_stream
from hf_zero_stream.errors import ConfigError
from tests.support.cli import run
from tests.support.cluster import run_ranks
from tests.support.parity import ds_config
from tests.support.zoo import Checkpoint


CHUNK = "stage3_partition_stream_chunk_size"
WRONG: dict[str, dict[str, Any]] = {
    CHUNK: {CHUNK: 1000},
    "offload_param.pinmemory": {"offload_param": {"device": "cpu", "pinmemory": True}},
    "sub_group_size": {"sub_group_size": "many"},
}


def errors_of_loads(folder: Path, output: Path) -> dict[str, str]:
    """By key and way to load, on this rank."""
    found = {}
    for key, zero in WRONG.items():
        config = ds_config(**zero)

        def of_trainer(config: dict[str, Any] = config) -> None:
            arguments = transformers.TrainingArguments(output_dir=str(output), deepspeed=config, use_cpu=True)
            with hf_zero_stream.streaming():
                transformers.AutoModelForCausalLM.from_pretrained(folder)
            del arguments

        def of_ours(config: dict[str, Any] = config) -> None:
            hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(folder, ds_config=config)

        for way, load in (("Trainer", of_trainer), ("ours", of_ours)):
            with pytest.raises(ConfigError) as error:
                load()
            found[f"{key}, {way}"] = str(error.value)
    return found


def test_loads_name_the_key_on_all_ranks(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    for found in run_ranks(2, errors_of_loads, zoo_checkpoint("llama"), tmp_path):
        assert len(found) == 2 * len(WRONG)
        for name, text in found.items():
            assert text.startswith(f"zero_optimization: DeepSpeed does not take {name.partition(', ')[0]}: "), text
            assert "checkpoint" not in text.lower()
            assert ('"hf_zero_stream": {"staging_bytes": "64MiB"}' in text) == (CHUNK in text)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ds_config(**WRONG[CHUNK]), f"DeepSpeed does not take {CHUNK}: .*staging_bytes"),
        (
            ds_config(stage=2, offload_optimizer={"device": "cpu", "ratio": 0.5}),
            "not take all of it together: .*Stage 3",
        ),
        ({"zero_optimization": 3}, "zero_optimization: expected a JSON object in the DeepSpeed config; got 3"),
        ({**ds_config(), "communication_data_type": "bf15"}, "ds_config: expected DeepSpeed's config; .*'bf15'"),
        ({**ds_config(), "optimizer": {"type": "Adam", "params": 3}}, "ds_config: expected DeepSpeed's config"),
    ],
)
@pytest.mark.plugin("forecast")
def test_plans_name_it(zoo_checkpoint: Checkpoint, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hf_zero_stream.plan(str(zoo_checkpoint("llama")), world_size=2, ds_config=config)


@pytest.mark.plugin("forecast")
def test_the_command_names_it(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2, "%s": 5}}' % CHUNK)
    arguments = str(zoo_checkpoint("llama")), "--world-size", "2", "--ds-config", str(tmp_path / "ds.json")
    message = run("plan", *arguments, code=1).stderr
    assert message.startswith(f"ConfigError: zero_optimization: DeepSpeed does not take {CHUNK}: ")
