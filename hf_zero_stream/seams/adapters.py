"""PEFT's adapters: put on a model that is only planned, and refused by name where packed weights cannot have them.

From the first packed model on two of PEFT's methods stay replaced: they are called outside of ``streaming()`` too.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..errors import ConfigError, UnsupportedError, refuse_unknown_version
from ..packed.modules import packed_weights


__all__ = ["put_adapters_on", "refuse_for_packed"]


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


@functools.cache
def refuse_for_packed() -> None:
    """Have PEFT refuse to merge adapters into packed weights, and to target packed parameters of experts."""
    if importlib.util.find_spec("peft") is None:
        return
    from peft.tuners.tuners_utils import BaseTuner

    names = ("_check_merge_allowed", "inject_adapter")
    refuse_unknown_version("peft", [f"BaseTuner.{name}" for name in names if not hasattr(BaseTuner, name)])
    check_merge, inject = BaseTuner._check_merge_allowed, BaseTuner.inject_adapter

    @functools.wraps(check_merge)
    def check_merge_allowed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(packed_weights(module) for module in self.model.modules()):
            raise UnsupportedError(
                "The base model's weights are quantised and packed (hf_zero_stream's keep_quantized): adapters cannot "
                "be merged into them. Save the adapters, load the base model dequantised in one process, outside "
                "streaming() (a quantization_config with dequantize=True; with bitsandbytes, model.dequantize()), put "
                "the adapters on it (PeftModel.from_pretrained) and merge there."
            )
        return check_merge(self, *args, **kwargs)

    @functools.wraps(inject)
    def inject_adapter(self: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        targets = getattr(self.peft_config.get(adapter_name), "target_parameters", None) or ()
        for prefix, module in model.named_modules():
            for key in packed_weights(module):
                name = f"{prefix}.{key}"
                if any(name == target or name.endswith(f".{target}") for target in targets):
                    raise UnsupportedError(
                        f"target_parameters: {name} is a parameter of packed bytes (hf_zero_stream's keep_quantized), "
                        "to which no adapter can be added. Target modules (target_modules), or load with "
                        "keep_quantized=False."
                    )
        return inject(self, model, adapter_name, *args, **kwargs)

    BaseTuner._check_merge_allowed, BaseTuner.inject_adapter = check_merge_allowed, inject_adapter
