"""PEFT's adapters on packed weights: refused by name where these cannot have them, else as on weights of values.

Those of experts (``target_parameters``) are made in :mod:`.expert_adapters`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ...errors import UnsupportedError
from ...plugin_api import packed_weights, tensors_of_adapter
from .modules import is_packed_experts


_STARTS_WITHOUT_VALUES = ("gaussian", "eva")
"""Values of ``init_lora_weights`` that are texts, and for which PEFT does not read the base model's weights."""


def inject_adapter(
    original: Callable[..., Any], self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any
) -> Any:
    """``BaseTuner.inject_adapter`` on a model with packed weights."""
    config = self.peft_config[adapter_name]
    _refuse_reading(config)
    experts = {type(module) for module in model.modules() if is_packed_experts(module)}
    if experts and _is_lora(config):
        from .expert_adapters import take_experts

        take_experts(config, experts)
    result = original(self, model, adapter_name, *args, **kwargs)
    _cast_adapters(model, adapter_name)
    return result


def inject_parameters(
    original: Callable[..., Any], self: Any, peft_config: Any, model: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """``BaseTuner._inject_parameters``. PEFT has just made target_parameters of target_modules that are experts'."""
    _refuse_packed_targets(model, peft_config.target_parameters or (), takes_experts=_is_lora(peft_config))
    return original(self, peft_config, model, *args, **kwargs)


def _is_lora(config: Any) -> bool:
    """Whether adapters of this config may have layers of our own."""
    return hasattr(config, "_register_custom_module")


def _refuse_reading(config: Any) -> None:
    """Raise if adapters of this config are made from the values of the base model's weights."""
    start = getattr(config, "init_lora_weights", None)
    if getattr(config, "use_dora", False):
        setting = "use_dora: it needs the norms of the base model's weights"
    elif isinstance(start, str) and start not in _STARTS_WITHOUT_VALUES:
        setting = f"init_lora_weights={start!r}: it reads the base model's weights"
    else:
        return
    raise UnsupportedError(
        f"{setting}, and these are quantised and packed (hf_zero_stream's keep_quantized). Leave it out, or load with "
        "keep_quantized=False."
    )


def _refuse_packed_targets(model: nn.Module, targets: Iterable[str], *, takes_experts: bool) -> None:
    targets = tuple(targets)
    for prefix, module in model.named_modules():
        if takes_experts and is_packed_experts(module):
            continue
        for key in packed_weights(module):
            name = f"{prefix}.{key}"
            if any(name == target or name.endswith(f".{target}") for target in targets):
                raise UnsupportedError(
                    f"target_parameters: {name} is a parameter of packed bytes (hf_zero_stream's keep_quantized). Of "
                    "such parameters only those of experts take adapters, and of LoRA. Name the module of another "
                    "one in target_modules, or load with keep_quantized=False."
                )


def _cast_adapters(model: nn.Module, adapter_name: str) -> None:
    """Give adapters of packed layers the dtype of the layers' values, as PEFT does for plain layers.

    PEFT finds integers there, and leaves adapters in fp32. DeepSpeed trains adapters of one dtype only. What PEFT
    makes fp32 again afterwards, like VeRA's projections, has been rounded as those of plain layers.
    """
    for layer, tensors in tensors_of_adapter(model, adapter_name):
        for weight in packed_weights(layer.get_base_layer()).values():
            for tensor in tensors:
                if tensor.is_floating_point():
                    tensor.data = tensor.data.to(weight.dtype)
