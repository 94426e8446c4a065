"""PEFT's adapters: put on a model that is only planned, kept alike on ranks, merged, and saved without their base.

From the first packed or sharded model on PEFT's methods stay replaced: they are called outside of ``streaming()`` too.

PEFT adds to what a rank has of a weight when it merges. That is nothing, or of a small one a copy that the next gather
replaces: the merge is lost without a word. Inside ``streaming()`` each layer is gathered while PEFT merges it.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..bindings.install import override_methods
from ..checkpoint.safetensors import NotedShard
from ..errors import ConfigError, UnsupportedError
from ..holdings.introspection import has_partition, is_dtensor, is_packed, is_peft_model, is_streamed, lies_in_files
from ..holdings.own_names import adapter_names, named_parameters
from ..holdings.replicas import keep_alike
from ..holdings.steps import announce_edit
from ..ranks.coordinator import Coordinator
from ..ranks.rendezvous import MeetingKind
from ..registry import tool
from ..settings.scope import active_configs


def put_adapters_on(model: nn.Module, lora: Any) -> None:
    """Freeze `model`, which is only planned, and put LoRA adapters without memory on it.

    `lora` is PEFT's ``LoraConfig``, or a mapping of its arguments. Raises a ConfigError if PEFT does not take them.
    """
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("lora: expected PEFT to be installed (pip install peft); it is not")
    from peft import LoraConfig, inject_adapter_in_model

    try:
        config = LoraConfig(**lora) if isinstance(lora, Mapping) else lora
        inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    except (TypeError, ValueError) as error:  # an unknown argument; no module of these names
        raise ConfigError(f"lora: {error}") from error
    for param in model.parameters():
        if param.requires_grad:
            param.data = param.data.float()  # as get_peft_model does, and DeepSpeed leaves it


def inject_adapter(
    original: Callable[..., Any], self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any
) -> Any:
    """``BaseTuner.inject_adapter``; what packed weights cannot have is a matter of the plug-in.

    Adapters on models that FSDP2 has sharded already are kept alike on all ranks, if we have loaded the model.
    """
    if not is_packed(model) and not is_streamed(model):
        return original(self, model, adapter_name, *args, **kwargs)
    _refuse_replicas(model)
    if is_packed(model):
        original = partial(tool("inject_adapter", "packed", "adapters on packed weights"), original)
    result = original(self, model, adapter_name, *args, **kwargs)
    _keep_alike(model, adapter_name)
    return result


def _refuse_replicas(model: nn.Module) -> None:
    """Raise if FSDP2 has sharded `model` on more than one dimension: PEFT takes that for tensor parallelism."""
    for param in model.parameters():
        names = param.device_mesh.mesh_dim_names or () if isinstance(param, DTensor) else ()
        if len(names) > 1 and "tp" not in names:
            raise UnsupportedError(
                f"distributed_config: the model is sharded on a mesh of {', '.join(names)}, and PEFT would make "
                "adapters of the sizes of its shards. Shard it after get_peft_model (accelerate's FSDP2), or leave "
                "dp_replicate_size out."
            )


def _keep_alike(model: nn.Module, adapter_name: str) -> None:
    """If FSDP2 has sharded `model` already, have all ranks train the same adapters, which it does not know."""
    meshes = [param.device_mesh for param in model.parameters() if isinstance(param, DTensor)]
    if any("tp" in (mesh.mesh_dim_names or ()) for mesh in meshes):
        return  # PEFT shards adapters as tensor parallelism does, and sees to the others
    of_adapter = (tensor for _, tensors in tensors_of_adapter(model, adapter_name) for tensor in tensors)
    params = [each for each in of_adapter if isinstance(each, nn.Parameter) and not isinstance(each, DTensor)]
    if not meshes or not params or all(param.is_meta for param in model.parameters()):  # the last: only planned
        return
    if any(param.is_meta for param in params):
        raise UnsupportedError(
            "low_cpu_mem_usage=True: the model is sharded already (distributed_config), and adapters on it must have "
            "memory from the start. Leave it out."
        )
    keep_alike(params, meshes[0])


def tensors_of_adapter(model: nn.Module, adapter_name: str) -> Iterator[tuple[Any, list[torch.Tensor]]]:
    """Each layer that has an adapter of this name, and the adapter's parameters and buffers."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            tensors: list[torch.Tensor] = []
            for key in (*layer.adapter_layer_names, *layer.other_param_names):
                adapters: Any = getattr(layer, key, None)
                if isinstance(adapters, nn.Module) and adapter_name in adapters:  # a dict of modules or of tensors
                    each = adapters[adapter_name]
                    tensors += [*each.parameters(), *each.buffers()] if isinstance(each, nn.Module) else [each]
            yield layer, tensors


_MERGE = MeetingKind(
    "merge adapters",
    "Under ZeRO-3 all ranks must merge adapters, because each holds a part of every weight: take it out of "
    "`if accelerator.is_main_process:` and the like, or gather the whole model around it.",
    patience_s=600.0,
)


def _gathered(module: nn.Module) -> AbstractContextManager[None]:
    if not active_configs() or not any(map(has_partition, module.parameters())):
        return nullcontext()
    from ..holdings.deepspeed.partitions import gathered_module  # imports deepspeed, which takes seconds

    return gathered_module(module)


def check_merge_allowed(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """PEFT begins a merge with it: all ranks must come; packed weights, and those in files, cannot take it."""
    if is_packed(self.model):
        raise UnsupportedError(
            "The base model's weights are quantised and packed (hf_zero_stream's keep_quantized): adapters cannot be "
            "merged into them. Save the adapters, load the base model dequantised in one process, outside streaming() "
            "(a quantization_config with dequantize=True; with bitsandbytes, model.dequantize()), put the adapters on "
            "it (PeftModel.from_pretrained) and merge there."
        )
    if any(map(lies_in_files, self.model.parameters())):
        raise UnsupportedError(
            "The base model's weights stay in the checkpoint's files (frozen_weights=\"files\"): adapters cannot be "
            "merged into them. Save the adapters, load the base model with its weights in memory, put the adapters on "
            "it (PeftModel.from_pretrained) and merge there."
        )
    if active_configs() and any(map(has_partition, self.model.parameters())):
        from ..holdings.deepspeed.partitions import select_gathered

        if not select_gathered(self.model.parameters()):
            with Coordinator.of_default_group().watched(_MERGE):
                pass
    return original(self, *args, **kwargs)


@contextmanager
def onload_layer(original: Callable[..., Any], layer: Any) -> Iterator[None]:
    """PEFT merges a layer inside this, and unmerges it."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    announce_edit()
    holds_adapter = isinstance(layer, (BaseTunerLayer, AuxiliaryTrainingWrapper))
    with original(layer), _gathered(layer) if holds_adapter else nullcontext():
        yield


def lay_out_adapters(
    model: Any,
    folder: Path,
    entries: Mapping[str, torch.Tensor],
    adapters: Collection[str] | None = None,
    *,
    save_embedding_layers: bool | str = False,
) -> list[NotedShard]:
    """Lay out the shards of `adapters` as ``model.save_pretrained`` does, from the lazy `entries` of its state dict.

    As PEFT does it, those of another name than "default" get folders of their names.
    """
    from peft import get_peft_model_state_dict
    from peft.utils import SAFETENSORS_WEIGHTS_NAME

    if unknown := sorted({*(adapters or ())} - model.peft_config.keys()):
        raise ConfigError(f"selected_adapters: no adapter {unknown[0]}; known are {', '.join(model.peft_config)}")
    noted = []
    for name in model.peft_config if adapters is None else adapters:
        prompt, config = _prompt_of(model, name), model.peft_config[name]
        # So PEFT takes a prompt as it is, without running its module, of which a rank may hold a part.
        with override_methods(config, inference_mode=config.inference_mode or prompt is not None):
            tensors = get_peft_model_state_dict(
                model, state_dict=dict(entries), adapter_name=name, save_embedding_layers=save_embedding_layers
            )
        if prompt is not None:
            tensors["prompt_embeddings"] = entries[prompt]
        inner = "" if name == "default" else name
        _save_config(model, name, folder / inner)
        noted.append(NotedShard(str(Path(inner, SAFETENSORS_WEIGHTS_NAME)), tensors, {"format": "pt"}))
    return noted


def _save_config(model: Any, adapter: str, folder: Path) -> None:
    """Save an adapter's config as PEFT does: what AutoPeftModel needs is in it."""
    config, task = copy.copy(model.peft_config[adapter]), None
    is_prompt = config.is_prompt_learning
    if config.base_model_name_or_path is None:
        base = model.base_model if is_prompt else model.base_model.model
        config.base_model_name_or_path = vars(base).get("name_or_path") or None
    if config.task_type is None:
        cls = model._get_base_model_class(is_prompt_tuning=is_prompt)
        task = {"base_model_class": cls.__name__, "parent_library": cls.__module__}
    config.inference_mode = True
    config.save_pretrained(str(folder), auto_mapping_dict=task)


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
