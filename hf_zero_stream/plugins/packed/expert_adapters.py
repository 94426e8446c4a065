"""LoRA on packed experts: ``y = W_e x + scaling * B_e A_e x``, in PEFT's own layout.

PEFT's wrapper of a parameter (``target_parameters``) makes W + BA whole for each pass. Packed bytes have no sum, and a
product of two factors with the rows of an expert needs none. Adapters have the names and shapes of PEFT's, so that
those that are saved here are put on plain experts elsewhere, and the other way round.

Imported when PEFT puts adapters on a packed model: this imports PEFT.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora import layer

from ...plugin_api import packed_weights
from .modules import Factors, factors_beside


class ParamWrapper(layer.ParamWrapper):
    """PEFT's wrapper, for a packed parameter of experts; PEFT knows it by the name of its class."""

    def get_param(self) -> torch.Tensor:
        """A tensor without memory, of the shape and dtype of the values; PEFT asks it for nothing else."""
        packed = packed_weights(self.get_base_layer())[self.parameter_name]
        return torch.empty(packed.shape, dtype=packed.dtype, device="meta")

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        device = device or getattr(self.get_base_layer(), self.parameter_name).device
        for factor in (self.lora_A[adapter_name], self.lora_B[adapter_name]):
            if not factor.weight.is_meta:  # an adapter that is only planned
                factor.to(device)

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        beside = factors_beside(self.get_base_layer())
        beside[self.parameter_name] = [self._factors(name) for name in active_adapters if name in self.lora_A]
        try:
            yield
        finally:
            del beside[self.parameter_name]

    def _factors(self, name: str) -> Factors:
        # A module's parameter, and not a copy that outlives the call: ZeRO-3 gathers what is asked for in a forward.
        of_inputs, of_outputs = self.lora_A[name].weight, self.lora_B[name].weight
        experts = self.num_experts
        return Factors(
            of_inputs.view(experts, -1, of_inputs.shape[-1]),
            of_outputs.view(of_outputs.shape[0], -1, experts).permute(2, 0, 1),
            self.scaling[name],
        )


def wrapped_parameter(target: Any, adapter_name: str, *, parameter_name: str | None = None, **kwargs: Any) -> Any:
    """What PEFT is to put in place of packed experts, of which `parameter_name` gets an adapter; None: not ours."""
    return None if parameter_name is None else ParamWrapper(target, adapter_name, parameter_name, **kwargs)


def take_experts(config: Any, experts: Iterable[type]) -> None:
    """Have PEFT's LoraConfig `config` put its adapters of these classes of packed experts here."""
    config._register_custom_module(dict.fromkeys(experts, wrapped_parameter))
