"""Expert parallelism as DeepSpeed's AutoEP does it, with each rank given its own experts before anything is read.

``deepspeed.initialize`` with an ``expert_parallel`` section gathers every fused expert tensor on every rank, to keep
a slice of it. Here DeepSpeed's own conversion (``AutoEP``, tried with 0.19.8) runs while the model has layouts and no
data: a rank's expert parameters are slices of lazy tensors, marked to be partitioned over the ranks that hold the same
experts (the *expert-data-parallel* group), and are then loaded like all other parameters.

From then on ``AutoEP.ep_parser`` tells ``deepspeed.initialize`` that models that were converted here have no layers to
convert. Everything else that the section means to DeepSpeed stays: leave it in the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import nn

from ...errors import ConfigError, LoadError, UnsupportedError, refuse_unknown_version
from ...plugin_api import CONVERTED, Cut, ParameterBox, installed
from . import EXPERTS
from .original import Origin, converted_layers
from .original import with_original_experts as with_original_experts


try:
    from deepspeed.module_inject import auto_ep_config
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import MoELayerSpec
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
    from deepspeed.module_inject.auto_ep_presets import base as presets
    from deepspeed.moe.ep_repack import repack_expert_weights
    from deepspeed.runtime.config import get_expert_data_topo_config

    _RELIED_ON = (
        (AutoEP, "ep_parser"),
        (AutoEP, "replace_moe_layers"),
        (groups, "_create_expert_and_data_parallel"),
        (groups, "_get_expert_parallel_rank"),
        (groups, "_get_expert_data_parallel_group"),
        (presets, "_install_instance_transformers_output_recorders"),
    )
    _missing = [f"{owner.__name__}.{name}" for owner, name in _RELIED_ON if not hasattr(owner, name)]
except ImportError as error:
    _missing = [str(error)]
refuse_unknown_version("deepspeed", _missing, "expert_parallel (AutoEP, from 0.19.8 on)")


def convert(
    model: nn.Module, ds_config: Mapping[str, Any], missing: set[str], rank: int, world_size: int, *, make_groups: bool
) -> None:
    """Replace the mixture-of-experts blocks of a lazy model by DeepSpeed's, with this rank's experts only.

    Names that are `missing` are not in the checkpoint. `make_groups`: make the experts' process groups too (all
    ranks); without them the model can only be planned. Errors are the same on all ranks.
    """
    config = auto_ep_config.parse_autoep_config(ds_config["expert_parallel"])
    _check(config, ds_config, world_size)
    auto_ep = AutoEP(model, config)
    try:
        specs = auto_ep.ep_parser()
    except ValueError as error:
        raise UnsupportedError(f"expert_parallel: DeepSpeed cannot convert this model. {error}") from error
    try:
        auto_ep_config.validate_autoep_post_detection(config, specs)
    except ValueError as error:
        raise ConfigError(f"expert_parallel: {error}") from error
    for spec in specs:
        _refuse_missing(spec, missing)

    share = _experts_share(config.autoep_size, rank, world_size, get_expert_data_topo_config(ds_config), make_groups)
    with torch.no_grad():
        blocks = [model.get_submodule(spec.moe_module_name) for spec in specs]
        shapes = [{name: value.shape for name, value in block.state_dict().items()} for block in blocks]
        values = [_extract_values(block, spec, share) for block, spec in zip(blocks, specs, strict=True)]
        with torch.device("meta"), installed(EXPERTS):
            auto_ep.replace_moe_layers(specs, ep_size=share.parts, ep_rank=share.part)
        for spec, extracted, of_block, block in zip(specs, values, shapes, blocks, strict=True):
            layer = model.get_submodule(spec.moe_module_name)
            _assign_values(layer, extracted, share)
            vars(layer)[CONVERTED] = Origin(spec, of_block, block)
    if make_groups:
        installed(EXPERTS).__enter__()  # for good: nobody says when the model is initialised, or how often


def convert_like(live: nn.Module, lazy: nn.Module, missing: set[str]) -> None:
    """Give a `lazy` model, for each layer that was converted in `live`, lazy values under the names that it has there.

    Expert parameters are this rank's, as they are in `live`. Names that are `missing` are not in the checkpoint.
    """
    for name, origin in converted_layers(live).items():
        _refuse_missing(origin.spec, missing)
        layer, block = live.get_submodule(name), lazy.get_submodule(name)
        replacement = nn.Module()
        for path, value in _extract_values(
            block, origin.spec, _ExpertsShare(layer.ep_size, layer.ep_rank, 0, 1)
        ).items():
            prefix, _, key = path.rpartition(".")
            owner, is_param = _submodule(replacement, prefix), path in dict(layer.named_parameters())
            if is_param:
                owner.register_parameter(key, nn.Parameter(value.detach(), requires_grad=value.requires_grad))
            else:
                owner.register_buffer(key, value)
        spec = origin.spec
        kept = (("shared_experts", spec.shared_experts_name), ("shared_experts_gate", spec.shared_experts_gate_name))
        for name_of_deepspeed, own_name in kept:
            if own_name:
                replacement.add_module(name_of_deepspeed, block.get_submodule(own_name))
        lazy.set_submodule(name, replacement)


def _submodule(module: nn.Module, path: str) -> nn.Module:
    """The module at `path` inside `module`, made if it is not there."""
    for name in filter(None, path.split(".")):
        if name not in module._modules:
            module.add_module(name, nn.Module())
        module = module.get_submodule(name)
    return module


class _ExpertsShare(NamedTuple):
    """This rank's `part` of the `parts` of a layer's experts, as one of `ranks`; a plan has no `group`."""

    parts: int
    part: int
    rank: int
    ranks: int
    group: dist.ProcessGroup | None = None


def _experts_share(
    parts: int, rank: int, world_size: int, parts_lie_together: bool, make_groups: bool
) -> _ExpertsShare:
    """This rank's share of the experts. `parts_lie_together`: ranks with the same part follow each other."""
    if not make_groups:
        ranks = world_size // parts
        part, own = divmod(rank, ranks) if parts_lie_together else reversed(divmod(rank, parts))
        return _ExpertsShare(parts, part, own, ranks)
    groups._create_expert_and_data_parallel(
        parts, mp_size=1, pp_size=1, mp_mode="sp", use_data_before_expert_parallel_=parts_lie_together
    )
    name = f"ep_size_{parts}"
    part, group = groups._get_expert_parallel_rank(name), groups._get_expert_data_parallel_group(name)
    return _ExpertsShare(parts, part, dist.get_rank(group), dist.get_world_size(group), group)


def _check(config: Any, ds_config: Mapping[str, Any], world_size: int) -> None:
    """Refuse settings that are wrong by the config alone."""
    size = config.autoep_size
    if not isinstance(size, int) or size < 1 or world_size % size:
        divisors = [number for number in range(1, world_size + 1) if world_size % number == 0]
        raise ConfigError(
            f"expert_parallel.autoep_size is {size!r}, which does not divide the {world_size} ranks of this run; "
            f"use one of {divisors}, or another number of ranks."
        )
    tensor_parallel = ds_config.get("tensor_parallel", {}).get("autotp_size", 1)
    if tensor_parallel > 1:
        raise UnsupportedError(
            f"expert_parallel with tensor_parallel.autotp_size {tensor_parallel}: models are not streamed into tensor "
            "parallelism. Remove one of the two sections."
        )
    hpz = ds_config.get("zero_optimization", {}).get("zero_hpz_partition_size", 1)
    if hpz > 1:
        raise UnsupportedError(
            f"expert_parallel with zero_hpz_partition_size {hpz}: DeepSpeed has no secondary partitions of experts. "
            "Remove one of the two settings."
        )
    try:
        auto_ep_config.validate_autoep_config(config, world_size, pp_size=1, tp_size=1, sp_size=1)
    except ValueError as error:
        raise ConfigError(f"expert_parallel: {error}") from error


def _refuse_missing(spec: MoELayerSpec, missing: set[str]) -> None:
    prefixes = tuple(f"{spec.moe_module_name}.{child}." for child in (spec.router_name, spec.experts_name))
    found = sorted(name for name in missing if name.startswith(prefixes))
    if found:
        raise LoadError(
            f"expert_parallel: the checkpoint has no usable values for {', '.join(found[:8])} ({len(found)} in all), "
            "and the model's own initialisation does not know DeepSpeed's layers. Initialise and save the model "
            "without expert_parallel first, then load that checkpoint."
        )


def _extract_values(block: nn.Module, spec: MoELayerSpec, share: _ExpertsShare) -> dict[str, torch.Tensor]:
    """The lazy values that `block`'s replacement will have, by their names in it; leaves meta tensors in `block`."""
    router = block.get_submodule(spec.router_name)
    experts = block.get_submodule(spec.experts_name)
    w1, w2, w3 = repack_expert_weights(experts, spec, share.part, share.parts)
    values = {"experts.w1": w1, "experts.w2": w2, "experts.w3": w3, "router.gate.weight": router.weight}
    if spec.gate_bias:
        values["router.gate.bias"] = router.bias
    if spec.e_score_correction_bias_path is not None:
        owner = block.get_submodule(spec.e_score_correction_bias_path)
        values["router.e_score_correction_bias"] = owner.e_score_correction_bias
    kept = tuple(f"{name}." for name in (spec.shared_experts_name, spec.shared_experts_gate_name) if name)
    for prefix, module in block.named_modules():
        if f"{prefix}.".startswith(kept):
            continue  # moves into the replacement as it is
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                is_param = key in module._parameters
                setattr(module, key, nn.Parameter(empty, tensor.requires_grad) if is_param else empty)
    return values


def _assign_values(layer: AutoEPMoELayer, values: Mapping[str, torch.Tensor], share: _ExpertsShare) -> None:
    """Put lazy values into a replacement that was built on the meta device, with all that DeepSpeed noted on it."""
    for path, value in values.items():
        prefix, _, key = path.rpartition(".")
        module = layer.get_submodule(prefix)
        old = getattr(module, key)
        if isinstance(old, nn.Parameter):
            param = nn.Parameter(value.detach(), requires_grad=old.requires_grad)
            vars(param).update(vars(old))
            param._is_hf_initialized = True
            module._parameters[key] = param
        else:
            module._buffers[key] = value
    for param in layer.experts.parameters():
        count, *of_one = param.shape
        cut = Cut(0, share.parts, share.part)
        param._hf_zero_stream_box = ParameterBox.of_cuts((share.parts * count, *of_one), [cut])
        # DeepSpeed's names, which zero.Init reads or sets again.
        param.ds_zero_partition_rank = share.rank
        param.ds_zero_partition_world_size = share.ranks
        if share.group is not None:
            param.ds_zero_partition_process_group = share.group
    for key, buffer in layer._buffers.items():
        if buffer is not None:  # counts of tokens, which begin at nothing
            layer._buffers[key] = torch.zeros(buffer.shape, dtype=buffer.dtype)


def find_layers(original: Any, auto_ep: AutoEP) -> list[MoELayerSpec]:
    """The layers that ``deepspeed.initialize`` is to convert: none, if they were converted when loading."""
    sizes = {auto_ep.model.get_submodule(name).ep_size for name in converted_layers(auto_ep.model)}
    if not sizes:
        return original(auto_ep)
    if sizes != {auto_ep.config.autoep_size}:
        raise ConfigError(
            f"expert_parallel.autoep_size is {auto_ep.config.autoep_size} now, and was {sizes.pop()} when the model "
            "was loaded; give from_pretrained and deepspeed.initialize the same config."
        )
    return []


def install_by_name(original: Any, model: Any, entries: Any, output_capturing: Any, *args: Any) -> bool:
    """Give DeepSpeed a plain copy of transformers' table of outputs that models record, by names of classes.

    From transformers 5.23 on the table's own methods take models, and not the names with which DeepSpeed calls them.
    """
    registry = output_capturing._CAN_RECORD_REGISTRY
    before, by_name = dict.copy(registry), dict.copy(registry)

    def install(model: Any) -> None:
        dict.update(registry, by_name)
        output_capturing.maybe_install_capturing_hooks(model)

    copied = SimpleNamespace(maybe_install_capturing_hooks=install, _CAN_RECORD_REGISTRY=by_name)
    try:
        return original(model, entries, copied, *args)
    finally:
        for name in entries.keys() - before.keys():
            dict.pop(registry, name, None)
        dict.update(registry, before)
