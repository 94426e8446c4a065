"""What PEFT cannot do with packed weights is refused by name; else it fails deep inside, or trains something else.

From the first packed model on two of PEFT's methods stay replaced: they are called outside of ``streaming()`` too.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

from ..errors import UnsupportedError, refuse_unknown_version
from ..packed.modules import packed_weights


__all__ = ["refuse_for_packed"]


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
