"""What the tests that stand for transformers' own tests share.

Those are the files tests/loading/test_upstream_*.py, and tests/zero/test_training.py. Each docstring in them names the
test of transformers' repository that it stands for: those of ZeRO-3 are in
tests/trainer/distributed/test_trainer_distributed_deepspeed.py, those of conversions in
tests/utils/test_core_model_loading.py, of composite configs and dtypes in tests/utils/test_modeling_utils.py.
"""

import gc
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from tests.support.checkpoint_files import Tensors
from tests.support.parity import differences, ds_config, load_with, whole
from tests.sweep.tiny import make_checkpoints


def full_state(model: nn.Module) -> Tensors:
    """As `state_dict`, of a partitioned model; collective."""
    return {name: whole(value) for name, value in model.state_dict(keep_vars=True).items()}


def is_partitioned(model: nn.Module) -> bool:
    """Whether ZeRO-3 has partitioned every parameter."""
    return all(hasattr(param, "ds_tensor") for param in model.parameters())


def randomise(model: PreTrainedModel) -> PreTrainedModel:
    """Values in every parameter that no initialisation gives."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    return model


def gpt2_config(**kwargs: Any) -> transformers.GPT2Config:
    """Of a tiny model; `kwargs` add to it."""
    return transformers.GPT2Config(
        vocab_size=53, n_positions=16, n_embd=30, n_layer=2, n_head=3, bos_token_id=1, eos_token_id=2, **kwargs
    )


def tiny_checkpoint(model_type: str, folder: Path) -> Path:
    """Any of transformers' model types in bf16, written to `folder`."""
    make_checkpoints(model_type, None, {torch.bfloat16: folder})
    return folder


def see_dtypes(model: Any) -> dict[str, Any]:
    """The dtypes of the config, of its parts, and of the buffers."""
    config = model.config
    found = {"": config.dtype, **{key: getattr(config, key).dtype for key in config.sub_configs}}
    return {**found, **{name: buffer.dtype for name, buffer in model.named_buffers()}}


def compare_dtypes(folder: Path, class_name: str, dtypes: list[Any], ds_dtype: torch.dtype) -> dict[str, Any]:
    """Load with each of `dtypes`: parameters as plain loading gives them in DeepSpeed's dtype, all else as in that."""
    found = {}
    for dtype in dtypes:
        gc.collect()
        plain = load_with("plain", class_name, folder, {}, {"dtype": dtype})
        in_ds_dtype = load_with("plain", class_name, folder, {}, {"dtype": ds_dtype})
        for param, other in zip(plain.parameters(), in_ds_dtype.parameters(), strict=True):
            param.data = other.data
        streamed = load_with("streamed", class_name, folder, ds_config(ds_dtype), {"dtype": dtype})
        found[str(dtype)] = {
            "differences": differences(streamed, plain, ds_dtype),
            "dtypes": see_dtypes(streamed),
            "expected": see_dtypes(plain),
        }
        del streamed
    return found
