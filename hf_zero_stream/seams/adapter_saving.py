"""Models of PEFT, of which only adapters are trained; their base is frozen, and is saved by nobody."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.safetensors import NotedShard
from ..errors import UnsupportedError
from ..holdings.introspection import has_partition, is_dtensor, is_peft_model
from ..holdings.own_names import adapter_names, named_parameters


def lay_out_adapters(
    model: Any, folder: Path, entries: Mapping[str, torch.Tensor], adapters: Collection[str] | None = None
) -> list[NotedShard]:
    """Lay out the shards of `adapters` as ``model.save_pretrained`` does, from the lazy `entries` of its state dict.

    As PEFT does it, those of another name than "default" get folders of their names.
    """
    from peft import get_peft_model_state_dict
    from peft.utils import SAFETENSORS_WEIGHTS_NAME

    noted = []
    for name in model.peft_config if adapters is None else adapters:
        with _inference_config(model.peft_config[name], prompt := _prompt_of(model, name)):
            tensors = get_peft_model_state_dict(
                model, state_dict=dict(entries), adapter_name=name, save_embedding_layers=False
            )
        if prompt is not None:
            tensors["prompt_embeddings"] = entries[prompt]
        inner = "" if name == "default" else name
        config = copy.copy(model.peft_config[name])
        config.inference_mode = True  # as PEFT saves it
        config.save_pretrained(str(folder / inner))
        noted.append(NotedShard(str(Path(inner, SAFETENSORS_WEIGHTS_NAME)), tensors, {"format": "pt"}))
    return noted


def _prompt_of(model: Any, adapter: str) -> str | None:
    """The entry that a learned prompt is, which PEFT takes from the model itself; None for adapters of layers.

    Raises an UnsupportedError if ranks share a prompt that is computed of several parameters (all ranks).
    """
    kind = model.peft_config[adapter]
    if not kind.is_prompt_learning:
        return None
    encoder = model.prompt_encoder[adapter]
    if {name for name, _ in encoder.named_parameters()} == {"embedding.weight"}:
        return f"prompt_encoder.{adapter}.embedding.weight"
    if any(is_dtensor(param) for param in encoder.parameters()):
        raise UnsupportedError(
            f"The prompts of adapter {adapter!r} are computed by {type(encoder).__name__} of several parameters, and "
            "FSDP2 shards these. Use prompts without a projection, or the checkpoints of accelerate."
        )
    return None


@contextmanager
def _inference_config(config: Any, prompt: str | None) -> Iterator[None]:
    """Inside, PEFT takes a prompt as it is, without running its module, of which a rank may hold a part."""
    before = config.inference_mode
    config.inference_mode = before or prompt is not None
    try:
        yield
    finally:
        config.inference_mode = before


@contextmanager
def saving_all_adapters(model: Any) -> Iterator[None]:
    """Inside, DeepSpeed counts frozen adapters of a ZeRO-3 model among what is trained.

    The Trainer gathers what is trained, and has PEFT save all adapters from that: for one that it does not find, such
    as the reference of DPO, PEFT (0.21) saves the values of the others.
    """
    frozen = []
    if is_peft_model(model):
        adapters = adapter_names(model)
        named = [param for name, param in named_parameters(model) if name in adapters and has_partition(param)]
        frozen = [param for param in named if not param.requires_grad]
    try:
        for param in frozen:
            param.requires_grad = True
        yield
    finally:
        for param in frozen:
            param.requires_grad = False
