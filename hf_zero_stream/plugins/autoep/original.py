"""The names and layouts that a mixture-of-experts block had before AutoEP (see ``experts.py``), for saving it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ...errors import UnsupportedError
from ...plugin_api import CONVERTED


class Origin(NamedTuple):
    """A layer before its conversion: DeepSpeed's ``MoELayerSpec``, and the entries of its state dict, in order.

    `block` is the layer itself, on the meta device, but for the modules that it has in common with the converted one.
    """

    spec: Any
    shapes: Mapping[str, torch.Size]
    block: nn.Module


def origin_of(layer: nn.Module) -> Origin | None:
    """Return the origin of `layer`; None if it is not a converted one."""
    return vars(layer).get(CONVERTED)


def converted_layers(model: nn.Module) -> dict[str, Origin]:
    """Return the origins of the converted layers of `model`, by name."""
    layers = ((name, origin_of(layer)) for name, layer in model.named_modules())
    return {name: origin for name, origin in layers if origin is not None}


def with_original_experts(model: nn.Module, entries: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict's `entries` with those of converted layers replaced by those of the blocks that they were.

    `entries` has the values of all ranks' experts under the name of the parameter that has this rank's.
    """
    result = dict(entries)
    for prefix, origin in converted_layers(model).items():
        converted = {name.removeprefix(f"{prefix}."): result[name] for name in result if name.startswith(f"{prefix}.")}
        original = _original_entries(origin.spec, origin.shapes, converted)
        missing = origin.shapes.keys() - original.keys()
        if missing:
            raise UnsupportedError(
                f"{prefix}: DeepSpeed's expert parallel layer has nothing for {', '.join(sorted(missing))}, so the "
                "model cannot be saved in its own layout. Use DeepSpeed's checkpoints (engine.save_checkpoint)."
            )
        ordered: dict[str, Any] = {}
        for name, value in result.items():
            if not name.startswith(f"{prefix}."):
                ordered[name] = value
            elif f"{prefix}.{next(iter(origin.shapes))}" not in ordered:
                ordered |= {f"{prefix}.{key}": original[key] for key in origin.shapes}
        result = ordered
    return result


def _original_entries(spec: Any, shapes: Mapping[str, torch.Size], converted: Mapping[str, Any]) -> dict[str, Any]:
    """A block's entries, by name, from those of its replacement."""
    found: dict[str, Any] = {}
    renamed = {"router.gate.": f"{spec.router_name}."}
    if spec.has_shared_experts:
        renamed["shared_experts."] = f"{spec.shared_experts_name}."
    if spec.shared_experts_gate_name:
        renamed["shared_experts_gate."] = f"{spec.shared_experts_gate_name}."
    if spec.e_score_correction_bias_path is not None:
        path = f"{spec.e_score_correction_bias_path}.e_score_correction_bias"
        renamed["router.e_score_correction_bias"] = path.removeprefix(".")
    for name, value in converted.items():
        for theirs, ours in renamed.items():
            if name.startswith(theirs):
                found[ours + name.removeprefix(theirs)] = value
    if spec.expert_storage == "fused_3d":
        found |= _fused(spec, shapes, converted)
    else:
        for key, name in (("w1", spec.expert_w1_name), ("w2", spec.expert_w2_name), ("w3", spec.expert_w3_name)):
            if name is not None:
                for number, expert in enumerate(converted[f"experts.{key}"]):
                    weight = f"{spec.experts_name}.{number}.{name}"
                    found[weight if weight in shapes else f"{weight}.weight"] = expert
    return found


def _fused(spec: Any, shapes: Mapping[str, torch.Size], converted: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The reverse of DeepSpeed's ``ep_repack._repack_fused_3d``."""
    first, second = (f"{spec.experts_name}.{name}" for name in (spec.expert_w1_name, spec.expert_w2_name))
    if spec.expert_w3_name is not None:
        third = f"{spec.experts_name}.{spec.expert_w3_name}"
        return {
            first: converted["experts.w1"],
            second: converted["experts.w2"],
            third: converted["experts.w3"],
        }
    gate_up, down = (
        torch.cat([converted["experts.w1"], converted["experts.w3"]], dim=1),
        converted["experts.w2"],
    )
    if shapes[second] != down.shape or shapes[first] != gate_up.shape:
        gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    return {first: gate_up, second: down}
