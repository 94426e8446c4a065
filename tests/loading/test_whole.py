"""A load under several ranks that does not stream says so, once, with the reason and the line to change."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import transformers
from accelerate import init_empty_weights
from transformers.integrations import HfDeepSpeedConfig

import hf_zero_stream
from tests.support.cluster import run_ranks
from tests.support.messages import warnings_of
from tests.support.parity import ds_config
from tests.support.zoo import Checkpoint


TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
SRUN = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
ACCELERATE = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}


def load(folder: Path, **kwargs: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **kwargs)


LINE = f"{__file__}:{load.__code__.co_firstlineno + 1}"


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


@pytest.mark.parametrize(
    ("launcher", "texts"),
    [
        (TORCHRUN, [LINE, "a launcher announces 2 ranks", "Move the line that creates TrainingArguments"]),
        (SRUN, [LINE, "a launcher announces 2 ranks"]),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, [LINE]),
        (TORCHRUN | ACCELERATE, ["The launcher announces DeepSpeed ZeRO-3", "Move the line"]),
        (TORCHRUN | ACCELERATE | {"ACCELERATE_DEEPSPEED_ZERO3_INIT": "false"}, ["zero3_init_flag: true"]),
        (TORCHRUN | {"LOCAL_RANK": "1"}, []),  # one rank of a host speaks
        (TORCHRUN | {"WORLD_SIZE": "1"}, []),
        (TORCHRUN | FSDP | {"FSDP_VERSION": "2"}, []),  # accelerator.prepare() streams
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}, []),  # a batch script
    ],
)
def test_ranks_that_have_no_process_group_yet(
    zoo_checkpoint: Checkpoint, launcher: dict[str, str], texts: list[str]
) -> None:
    """Also with DeepSpeed's config, which comes later, and before a word of it is known."""
    transformers.utils.logging.warning_once.cache_clear()
    folder = zoo_checkpoint("llama")
    with environment(launcher), warnings_of("hf_zero_stream") as said, hf_zero_stream.streaming():
        for _ in range(2):
            load(folder)
    assert len(said) == bool(texts), said
    for text in texts:
        assert text in said[0]


def left_to_stock(folder: Path) -> dict[str, list[str]]:
    """What this rank is told of loads that are left to transformers, and of models that DeepSpeed finds whole."""
    found = {}
    ways: dict[str, tuple[dict[str, str], Any, dict[str, Any]]] = {
        "shared": ({}, nullcontext(), {}),
        "device_map": ({}, nullcontext(), {"device_map": "cpu"}),
        "empty": ({}, init_empty_weights(), {}),
        "FSDP": (FSDP | {"FSDP_VERSION": "1"}, nullcontext(), {}),
    }
    with hf_zero_stream.streaming():
        for name, (variables, context, kwargs) in ways.items():
            with environment(variables), context, warnings_of("hf_zero_stream") as found[name]:
                load(folder, **kwargs)
                load(folder, **kwargs)
        late = load(folder)
        config = HfDeepSpeedConfig(ds_config())
        early = load(folder)
    for name, model in {"late": late, "early": early}.items():
        with warnings_of("hf_zero_stream") as found[name]:
            deepspeed.initialize(model=model, config=config.config)
    return found


def test_what_is_left_to_stock(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    folder = zoo_checkpoint("llama")
    first, second = run_ranks(2, left_to_stock, folder)
    assert not any(second.values()), second
    assert not first["shared"] and not first["early"], first
    reasons = {"device_map": "because device_map= puts", "empty": "init_empty_weights() puts", "FSDP": "RAM_EFFICIENT"}
    for name, text in {**reasons, "late": f"{folder} has been loaded whole by every rank ({LINE})"}.items():
        assert len(first[name]) == 1 and text in first[name][0], first
    assert "there was no config of ZeRO-3" in first["late"][0] and "Move the line" in first["late"][0]
