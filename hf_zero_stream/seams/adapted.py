"""Models of PEFT, of which only adapters are trained; their base is frozen, and is saved by nobody."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.safetensors import NotedShard
from ..errors import UnsupportedError


__all__ = ["is_adapted", "is_peft_model", "lay_out_adapter"]


def is_adapted(model: Any) -> bool:
    """Whether of `model` only adapters are saved: by ``peft.get_peft_model``, or transformers' ``add_adapter``."""
    return is_peft_model(model) or getattr(model, "_hf_peft_config_loaded", False)


def is_peft_model(model: Any) -> bool:
    """Whether `model` is one that ``peft.get_peft_model`` returned."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def lay_out_adapter(model: Any, folder: Path, entries: Mapping[str, torch.Tensor]) -> list[NotedShard]:
    """What ``model.save_pretrained`` saves of its only adapter, with the lazy `entries` of the model's state dict.

    Raises:
        UnsupportedError: there are several adapters, or an entry of the adapter is not among `entries`.
    """
    from peft import get_peft_model_state_dict
    from peft.utils import SAFETENSORS_WEIGHTS_NAME

    if len(model.peft_config) != 1:
        raise UnsupportedError(
            f"The model has {len(model.peft_config)} adapters ({', '.join(model.peft_config)}), and a training state "
            "has one. Train one at a time, or use the checkpoints of DeepSpeed or accelerate."
        )
    ((name, config),) = model.peft_config.items()
    tensors = get_peft_model_state_dict(
        model, state_dict=dict(entries), adapter_name=name, save_embedding_layers=False
    )
    config = copy.copy(config)
    config.inference_mode = True  # as PEFT saves it
    config.save_pretrained(str(folder))
    return [NotedShard(SAFETENSORS_WEIGHTS_NAME, tensors, {"format": "pt"})]
