"""`from_pretrained(ds_config=...)` gives back transformers' DeepSpeed config: models and users' own configs mix."""

import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import modeling_utils
from transformers.integrations import deepspeed as transformers_deepspeed
from transformers.integrations.deepspeed import (
    HfDeepSpeedConfig,
    is_deepspeed_zero3_enabled,
    unset_hf_deepspeed_config,
)

import hf_zero_stream
from tests.support.cluster import run_ranks
from tests.support.parity import ds_config
from tests.support.zoo import Checkpoint


def load(folder: Path | str, config: Any, **kwargs: Any) -> Any:
    return hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(folder, ds_config=config, **kwargs)


def in_force() -> Any:
    """What tells the configs below apart."""
    gc.collect()
    config = transformers_deepspeed.deepspeed_config()
    return None if config is None else config.get("gradient_clipping")


def marked(number: float, stage: int = 3) -> dict[str, Any]:
    config = ds_config(torch.bfloat16)
    config["zero_optimization"]["stage"] = stage
    return {**config, "gradient_clipping": number}


def what_counts(folder: Path) -> list[Any]:
    """The config in force at each step."""
    original = transformers_deepspeed.set_hf_deepspeed_config
    found: list[Any] = []

    # A model's config is gone with the model.
    users = HfDeepSpeedConfig(marked(1))
    first, _ = load(folder, marked(2), output_loading_info=True)
    found.append(("first", in_force()))
    second = load(folder, marked(3))
    found.append(("second", in_force()))
    del first
    found.append(("first deleted", in_force()))
    del second
    found.append(("both deleted", in_force(), is_deepspeed_zero3_enabled()))

    # A load that fails, at once or later, leaves nothing behind; not while somebody keeps the error either.
    errors = []
    for path, config in (
        (folder / "missing", marked(4)),
        (folder, {**marked(5), "hf_zero_stream": {"no such setting": 1}}),
        (folder, {**marked(6), "weight_quantization": {"quantized_initialization": {"num_bits": 4}}}),
        (folder, "no such file.json"),
        (folder, {"bf16": {"enabled": True}, "zero_optimization": 7}),
    ):
        try:
            load(path, config)
        except Exception as error:
            errors.append(error)
            found.append(("failed", in_force(), is_deepspeed_zero3_enabled()))
    assert len(errors) == 5

    # The user's newer one counts, then the model's again; the user's older one was replaced, and does not come back.
    model = load(folder, marked(7))
    newer = HfDeepSpeedConfig(marked(8, stage=2))
    found.append(("newer", in_force(), is_deepspeed_zero3_enabled()))
    newest = HfDeepSpeedConfig(marked(9))
    del newest
    found.append(("newest deleted", in_force()))
    del newer
    duplicate = copy.deepcopy(model.config), copy.copy(model)
    del model
    found.append(("a copy lives", in_force()))
    del duplicate
    found.append(("copy deleted", in_force()))

    # What is unset stays so, although a model that has a config lives on.
    model = load(folder, marked(10))
    unset_hf_deepspeed_config()
    found.append(("unset", in_force()))
    other = load(folder, marked(11))
    found.append(("after unset", in_force()))
    del other
    found.append(("nothing", in_force()))
    del model, users

    # A user's config that is made while a load hides ZeRO-3 from its thread is seen afterwards.
    from hf_zero_stream.seams.ds_config import zero3_hidden

    model = load(folder, marked(12))
    with zero3_hidden():
        users = HfDeepSpeedConfig(marked(13))
        found.append(("hidden", in_force()))
    found.append(("not hidden", in_force()))
    del users
    found.append(("the model's", in_force()))
    del model
    found.append(("end", in_force()))
    last = HfDeepSpeedConfig(marked(14))
    found.append(("last", in_force(), transformers_deepspeed.set_hf_deepspeed_config is original))
    del last
    return found


def test_the_newest_that_is_alive_counts(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    for found in run_ranks(2, what_counts, zoo_checkpoint("llama", torch.bfloat16)):
        assert found == [
            ("first", 2),
            ("second", 3),
            ("first deleted", 3),
            ("both deleted", 1, True),
            *[("failed", 1, True)] * 5,
            ("newer", 8, False),
            ("newest deleted", 7),
            ("a copy lives", 7),
            ("copy deleted", None),
            ("unset", None),
            ("after unset", 11),
            ("nothing", None),
            ("hidden", None),
            ("not hidden", 13),
            ("the model's", 12),
            ("end", None),
            ("last", 14, True),
        ]


def resize_the_first(folder: Path) -> tuple[list[int], list[int]]:
    """Two models; the second is deleted, and the first gets more tokens. And a copy of a model whose original is."""
    first, second = load(folder, ds_config(torch.bfloat16)), load(folder, ds_config(torch.bfloat16))
    del second
    gc.collect()
    first.resize_token_embeddings(317)
    for param in (first.get_input_embeddings().weight, first.lm_head.weight):
        assert list(getattr(param, "ds_shape", param.shape)) == [317, first.config.hidden_size]
    third = load(folder, ds_config(torch.bfloat16))
    plain = [hasattr(param, "ds_tensor") for param in third.parameters()]
    return [first.config.vocab_size, third.config.vocab_size], [sum(plain), len(plain)]


def test_two_models(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    for sizes, (partitioned, number) in run_ranks(2, resize_the_first, zoo_checkpoint("llama", torch.bfloat16)):
        assert sizes == [317, 311] and partitioned == number


def test_hidden_from_functions_that_others_put_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """axolotl has transformers take ZeRO-3 for enabled, whatever its config is."""
    from hf_zero_stream.seams.ds_config import zero3_hidden

    def say_yes() -> bool:
        return True

    monkeypatch.setattr(modeling_utils, "is_deepspeed_zero3_enabled", say_yes)
    with zero3_hidden():
        assert not modeling_utils.is_deepspeed_zero3_enabled()
        with ThreadPoolExecutor() as threads:
            assert threads.submit(modeling_utils.is_deepspeed_zero3_enabled).result()
        with zero3_hidden():
            pass
        assert not modeling_utils.is_deepspeed_zero3_enabled()
    assert modeling_utils.is_deepspeed_zero3_enabled is say_yes
