"""Adapters that PEFT merges into a ZeRO-3 model of which nothing is gathered.

PEFT adds to what a rank has of a weight. That is nothing, or of a small one a copy that the next gather replaces: the
merge is lost without a word. Inside ``streaming()`` each layer is gathered while PEFT merges it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from ..destinations.deepspeed.marks import has_partition
from ..errors import UnsupportedError
from ..packed.modules import is_packed
from ..ranks.coordinator import Coordinator
from ..ranks.rendezvous import Occasion
from ..settings.scope import active_configs


_MERGE = Occasion(
    "merge adapters",
    "Under ZeRO-3 all ranks must merge adapters, because each holds a part of every weight: take it out of "
    "`if accelerator.is_main_process:` and the like, or gather the whole model around it.",
    patience_s=600.0,
)


def _changing(module: nn.Module) -> AbstractContextManager[None]:
    if not active_configs() or not any(map(has_partition, module.parameters())):
        return nullcontext()
    from ..destinations.deepspeed.gathered import changing  # imports deepspeed, which takes seconds

    return changing(module)


def check_merge_allowed(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """PEFT begins a merge with it: all ranks must come; packed weights cannot take it."""
    if is_packed(self.model):
        raise UnsupportedError(
            "The base model's weights are quantised and packed (hf_zero_stream's keep_quantized): adapters cannot be "
            "merged into them. Save the adapters, load the base model dequantised in one process, outside streaming() "
            "(a quantization_config with dequantize=True; with bitsandbytes, model.dequantize()), put the adapters on "
            "it (PeftModel.from_pretrained) and merge there."
        )
    if active_configs() and any(map(has_partition, self.model.parameters())):
        from ..destinations.deepspeed.gathered import gathered

        if not gathered(self.model.parameters()):
            with Coordinator.of_default_group().watched(_MERGE):
                pass
    return original(self, *args, **kwargs)


@contextmanager
def onload_layer(original: Callable[..., Any], layer: Any) -> Iterator[None]:
    """PEFT merges a layer inside this, and unmerges it."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    holds_adapter = isinstance(layer, (BaseTunerLayer, AuxiliaryTrainingWrapper))
    with original(layer), _changing(layer) if holds_adapter else nullcontext():
        yield
