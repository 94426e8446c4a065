"""Chooses the destination of a ``from_pretrained``, or leaves the load to stock transformers."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import modeling_utils
from transformers.integrations import is_fsdp_enabled
from transformers.utils import logging

from .. import accelerators
from ..bindings.table import refuse_unsafe_partitions
from ..destinations.base import Destination
from ..engine.load import Load
from ..errors import ConfigError, UnsupportedError
from ..holdings.introspection import is_inside_zero_init
from ..ranks.coordinator import Coordinator, expected_at
from ..ranks.rendezvous import LOAD
from ..registry import broken_plugins, import_object, plugins, tool
from ..settings import scope
from ..settings.config import (
    StreamingConfig,
    announced_local_rank,
    announced_ranks,
    config_without_auto,
)
from ..sources.by_path import mount_of
from .arguments import ALONE, is_one_of_several, shards_by_fsdp2
from .whole import warn_of_late_config, warn_of_stock_load, warn_without_group


logger = logging.get_logger(__name__)


class Way(enum.Enum):
    """The ways to load a model."""

    STOCK = "transformers loads it"
    PLUGIN = "into the destination of a plug-in"
    PARTITIONS = "into ZeRO-3's partitions"
    SHARDS = "into the shards of distributed_config"
    FSDP2 = "lazily, until accelerate shards it by FSDP2"
    AUTOTP = "lazily, until DeepSpeed cuts it by AutoTP"
    WHOLE = "whole on every rank"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What becomes of a ``from_pretrained``.

    Attributes:
        is_joint: all ranks meet for this load; else each makes it at its own pace.
        subject: what this rank loads; see :meth:`..ranks.coordinator.Coordinator.watched`.
        reason: why it is left to stock.
        device: of shards.
        packing_unsupported_reason: why weights cannot be packed in shards; "" if they can.
    """

    way: Way
    settings: StreamingConfig
    ds_config: Mapping[str, Any]
    is_joint: bool = False
    subject: str = ""
    reason: str = ""
    device: torch.device = torch.device("cpu")
    packing_unsupported_reason: str = ""


def choose(
    cls: Any, path: Any, kwargs: Mapping[str, Any], ds_config: dict[str, Any], strict: bool | None, *, is_zero3: bool
) -> Choice:
    """Choose the load into shards, ZeRO-3's partitions, models that FSDP2 (by accelerate) will shard or AutoTP cut, or
    whole models whose ranks share the reading; or else say why it is left to stock.

    `ds_config` may have any stage, and is empty if there is none, as there may be inside a ``zero.Init``, too; the
    other arguments are those of ``from_pretrained``.
    """
    if is_zero3:
        from ..destinations.deepspeed import zero3  # imports deepspeed, which takes seconds

        zero3.init_distributed()
    else:
        warn_of_late_config()
    with expected_at(LOAD):
        chosen = partial(Choice, settings=(settings := settings_for(ds_config, strict)), ds_config=ds_config)
        if settings.micro_batches_in_layers > 1 and settings.frozen_weights != "files":
            raise ConfigError(
                f"micro_batches_in_layers={settings.micro_batches_in_layers}: expected 1, or "
                'frozen_weights="files"; weights in memory are not read again for each micro-batch.'
            )
        if settings.frozen_weights == "files" and not is_zero3:
            raise UnsupportedError(
                'frozen_weights="files" is for ZeRO-3, whose ranks gather a layer when it is used; no DeepSpeed '
                "config with stage 3 is active. Make one first (HfDeepSpeedConfig, TrainingArguments), or leave it."
            )
        if settings.destination:
            return chosen(way=Way.PLUGIN, is_joint=is_one_of_several())
        will_be_cut = _will_be_cut_by_autotp(ds_config) and not _placement_argument(kwargs)
        if is_zero3:
            refuse_pieces(path, kwargs)
            is_lazy = will_be_cut and not is_inside_zero_init() and settings.frozen_weights != "files"
            return chosen(way=Way.AUTOTP if is_lazy else Way.PARTITIONS, is_joint=True)
        if reason := _reason_of_folder(path, kwargs):
            return chosen(way=Way.STOCK, reason=reason)
        from ..seams.sharding import cuts_matrices, distributed_config_of, init_distributed

        if (sharding := distributed_config_of(kwargs)) is not None:
            if is_pipeline(sharding):
                reason = f"with pp_size={sharding.pp_size} ranks hold different models"
                warn_of_stock_load(reason)
                return chosen(way=Way.STOCK, reason=reason)
            shards = chosen(way=Way.SHARDS, is_joint=True, packing_unsupported_reason=cuts_matrices(sharding))
            return replace(shards, device=init_distributed())
    subject = f"{cls.__name__} from {path}"  # each rank may have a model of its own, of the same shape
    if will_be_cut or (not ds_config and shards_by_fsdp2() and not _placement_argument(kwargs)):
        # Ranks meet when the model is sharded. Until then they only need each other where one reads for others.
        is_joint = bool(mount_of(path)) or settings.read_from != "all"
        return chosen(way=Way.AUTOTP if will_be_cut else Way.FSDP2, is_joint=is_joint, subject=subject)
    has_group = is_one_of_several()
    if (has_group or announced_ranks() > 1) and (reason := _stock_reason(kwargs)):
        warn_of_stock_load(reason)
        return chosen(way=Way.STOCK, reason=reason)
    if not has_group:
        warn_without_group(path)
        reason = ALONE if announced_ranks() <= 1 else "its ranks had no process group yet"
        return chosen(way=Way.STOCK, reason=reason)
    if settings.share_reads:
        return chosen(way=Way.WHOLE, is_joint=True, subject=subject)
    reason = "outside ZeRO-3 each rank has all of the model; with share_reads=True each reads a part of it for all"
    return chosen(way=Way.STOCK, reason=reason)


def for_one_rank(choice: Choice, path: Any, kwargs: Mapping[str, Any]) -> Choice:
    """In place of a `choice` that leaves to stock what it cannot read: a whole model, without other ranks.

    Raises an UnsupportedError if the call asks for more than a whole model in host memory.
    """
    if what := _placement_argument(kwargs):
        raise UnsupportedError(
            f"{path}: with {what} this load is left to transformers, which cannot read weights from a URL. Leave it "
            "out and move the model afterwards, or download the checkpoint."
        )
    return replace(choice, way=Way.WHOLE, is_joint=False, subject="")


def make_load(choice: Choice, coordinator: Coordinator) -> Load:
    """The load that was chosen; called once the ranks are together, if they meet for it."""
    settings, ds_config = choice.settings, choice.ds_config
    match choice.way:
        case Way.PLUGIN:
            return Load(settings, config_without_auto(ds_config), coordinator, _of_plugin(choice, coordinator))
        case Way.PARTITIONS:
            return _load_partitioned(choice, coordinator)
        case Way.SHARDS:
            from ..destinations.parallel import DTensors  # imports torch's FSDP2

            shards = DTensors(
                coordinator,
                choice.device,
                packing_unsupported_reason=choice.packing_unsupported_reason,
                shares_reads=not settings.compares_values,
            )
            return Load(settings, config_without_auto(ds_config), coordinator, shards)
        case Way.FSDP2:
            from .deferral import load_for_fsdp2

            reader = "the first rank of each node" if is_fsdp_enabled() else "each rank"
            return load_for_fsdp2(settings, coordinator, stock_reader=reader)
        case Way.AUTOTP:
            return tool("load_for_autotp", "autotp", "tensor_parallel.autotp_size")(settings, coordinator)
        case _:
            return _load_whole(choice, coordinator)


def refuse_pieces(path: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise an UnsupportedError for a folder that torch alone can read, into a model that is sharded already."""
    if pieces := _pieces_in(path, kwargs):
        raise UnsupportedError(
            f"{pieces}, which are not read in parts. Save it with save_pretrained(distributed_checkpoint=False)."
        )


def _reason_of_folder(path: Any, kwargs: Mapping[str, Any]) -> str:
    """Why what is in a folder is left to stock, with a warning; "" if it is not."""
    if not (pieces := _pieces_in(path, kwargs)):
        return ""
    reason = f"{pieces}, of which torch reads what each rank needs"
    warn_of_stock_load(reason)
    return reason


def _pieces_in(path: Any, kwargs: Mapping[str, Any]) -> str:
    """A phrase for a folder that ``save_pretrained(distributed_checkpoint=True)`` wrote; "" for any other."""
    find = getattr(modeling_utils, "get_distributed_checkpoint_dir", None)  # from transformers 5.20 on
    others = (kwargs.get("subfolder") or "", kwargs.get("gguf_file"), kwargs.get("state_dict"))
    folder = None if find is None or path is None else find(path, *others)
    return f"{folder} holds a distributed checkpoint in pieces of safetensors, one for each rank" if folder else ""


def _will_be_cut_by_autotp(ds_config: Mapping[str, Any]) -> bool:
    """Whether ``deepspeed.initialize`` with `ds_config` cuts models, and converts no experts."""
    size = (ds_config.get("tensor_parallel") or {}).get("autotp_size", 0)
    return isinstance(size, int) and size > 1 and not (ds_config.get("expert_parallel") or {}).get("enabled")


def _of_plugin(choice: Choice, coordinator: Coordinator) -> Destination:
    """The destination that a plug-in brings under the name in the settings."""
    found = {name: function for plugin in plugins() for name, function in plugin.destinations.items()}
    name = choice.settings.destination
    if name not in found:
        raise ConfigError(
            f"destination: expected one that a plug-in brings ({', '.join(sorted(found)) or 'none is installed'}); "
            f"got {name!r}. {broken_plugins()}".rstrip()
        )
    make: Callable[..., Destination] = import_object(found[name])
    return make(coordinator, choice.settings, choice.ds_config)


def _load_partitioned(choice: Choice, coordinator: Coordinator) -> Load:
    from ..destinations.deepspeed import partitioned, zero3

    refuse_unsafe_partitions()
    ds_config, around = choice.ds_config, None
    full_config = config_without_auto(ds_config)
    if is_inside_zero_init():
        from ..holdings.deepspeed import zero_init

        around = zero_init.open_init()
        full_config = zero_init.config_of(around, full_config if ds_config else {})
    partitions = partitioned.Partitioned(full_config, coordinator, around=around)
    load = Load(choice.settings, full_config, coordinator, partitions)
    zero3.refuse_unsupported(full_config)
    if choice.settings.frozen_weights == "files":
        make_swapper = tool("file_swapper", "from_files", 'frozen_weights="files"')
        partitions.file_swapper = make_swapper(load.checkpoint, full_config)
    if _builds_without_memory():
        raise UnsupportedError(
            "from_pretrained inside accelerate's init_empty_weights() would leave every parameter without values. "
            "Call it outside: under streaming() no rank holds the whole model anyway."
        )
    if (sections := zero3.undecided(ds_config)) and coordinator.is_main:
        warn_of_open_dtype(sections, 'Set "enabled" to true or false.')
    return load


def is_pipeline(distributed_config: Any) -> bool:
    """Whether ranks will hold different models."""
    return getattr(distributed_config, "pp_size", 1) not in (None, 1)


def _load_whole(choice: Choice, coordinator: Coordinator) -> Load:
    from ..destinations.parallel import Replicated

    full_config, stage = config_without_auto(choice.ds_config), None
    if choice.ds_config:
        from ..holdings.deepspeed.partitions import local_device

        device, stage = local_device(), (full_config.get("zero_optimization") or {}).get("stage", 0)
    else:
        kind = accelerators.kind()
        device = (kind and accelerators.device_of_rank(kind, announced_local_rank())) or torch.device("cpu")
    return Load(choice.settings, full_config, coordinator, Replicated(coordinator, choice.settings, device, stage))


def settings_for(ds_config: Mapping[str, Any], strict: bool | None) -> StreamingConfig:
    """Our settings for a load under `ds_config`; `strict`, unless None, is that of the call, which counts more."""
    settings = StreamingConfig.resolve(scope.current_config(), ds_config)
    return settings if strict is None else replace(settings, strict=strict)


def _stock_reason(kwargs: Mapping[str, Any]) -> str:
    """The reason why not each of several ranks would load all of the model into its host memory; "" if each would."""
    if sharding := _sharding_argument(kwargs):
        from ..seams.sharding import is_known

        needs = "" if is_known() else ", which is streamed with transformers 5.17 or newer"
        return f"{sharding}= shards the model{needs}"
    if placement := _placement_argument(kwargs):
        return f"{placement} puts the model elsewhere than into host memory"
    return "with FSDP_CPU_RAM_EFFICIENT_LOADING rank 0 of each host loads alone" if is_fsdp_enabled() else ""


def _placement_argument(kwargs: Mapping[str, Any]) -> str:
    """Name the argument or setting that asks for more than the whole model in host memory; "" if none does."""
    for name in ("device_map", "state_dict"):
        if kwargs.get(name) is not None:
            return f"{name}="
    if _builds_without_memory():
        return "accelerate's init_empty_weights()"
    is_elsewhere = torch.get_default_device().type != "cpu"
    return _sharding_argument(kwargs) or ("another default device than the CPU" if is_elsewhere else "")


def warn_of_open_dtype(sections: list[str], advice: str) -> None:
    """Warn once per host that a DeepSpeed config leaves the dtype open in `sections`."""
    if announced_local_rank():
        return
    logger.warning_once(
        f'The DeepSpeed config has "{sections[0]}": {{"enabled": "auto"}}, and neither accelerate nor the Trainer has '
        f"filled it in. It counts as off, as in DeepSpeed: parameters are in fp32. {advice}"
    )


def _sharding_argument(kwargs: Mapping[str, Any]) -> str:
    """The argument of ``from_pretrained`` by which transformers shards the model; "" if it will not."""
    for name in ("tp_plan", "tp_size", "device_mesh"):
        if kwargs.get(name) is not None:
            return name
    if (config := kwargs.get("distributed_config")) is None:
        return ""
    from ..seams.sharding import SIZES

    if isinstance(config, Mapping):
        asks = config.get("tp_plan") is not None or any(config.get(size) not in (None, 1) for size in SIZES)
    else:
        # Before transformers 5.14 a config may have no sizes, and a model is sharded whenever one is given.
        asks = any(getattr(config, size, None) != 1 for size in SIZES)
    return "distributed_config" if asks else ""


def _builds_without_memory() -> bool:
    """Whether accelerate's ``init_empty_weights()`` is active, under which every parameter becomes a meta tensor."""
    return torch.nn.Module.register_parameter.__module__.startswith("accelerate.")


def refuse_sharding(path: str, kwargs: Mapping[str, Any]) -> None:
    """Raise an UnsupportedError if transformers would shard the model that is to be streamed or planned."""
    if sharding := _sharding_argument(kwargs):
        raise UnsupportedError(
            f"{path}: {sharding}= shards the model by transformers' own code, and is known only to from_pretrained. "
            "Leave it out, or load with from_pretrained."
        )
