"""Chooses the destination of a ``from_pretrained``, or leaves the load to stock transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers.integrations import is_fsdp_enabled
from transformers.utils import logging

from .. import accelerators
from ..bindings.table import refuse_unsafe_partitions
from ..destinations.base import Destination
from ..engine.load import Load
from ..errors import ConfigError, UnsupportedError
from ..ranks.coordinator import Coordinator, expected_at
from ..ranks.rendezvous import LOAD, MeetingKind
from ..registry import broken_plugins, import_object, plugins
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


class Choice(NamedTuple):
    """A load that streams.

    Attributes:
        meeting_kind: the meeting of all ranks for this load; None: each makes the load at its own pace.
        subject: what this rank loads; see :meth:`..ranks.coordinator.Coordinator.watched`.
        make_load: called once the ranks are together.
    """

    meeting_kind: MeetingKind | None
    subject: str
    make_load: Callable[[Coordinator], Load]


def choose(
    cls: Any, path: Any, kwargs: Mapping[str, Any], ds_config: dict[str, Any], strict: bool | None, *, is_zero3: bool
) -> Choice | str:
    """Choose the load into shards, ZeRO-3's partitions, models that FSDP2 (by accelerate) will shard or AutoTP cut, or
    whole models whose ranks share the reading; or else say why it is left to stock.

    `ds_config` may have any stage, and is empty if there is none, as there may be inside a ``zero.Init``, too; the
    other arguments are those of ``from_pretrained``.
    """
    with suppress(ConfigError):  # raised below, where the other ranks are told
        if (settings := settings_for(ds_config, strict)).destination:
            meeting_kind = LOAD if is_one_of_several() else None
            return Choice(meeting_kind, "", partial(_load_by_plugin, ds_config, settings))
    if is_zero3:
        from ..destinations.deepspeed import zero3  # imports deepspeed, which takes seconds

        zero3.init_distributed()
        return Choice(LOAD, "", partial(_load_partitioned, ds_config, strict))
    from ..seams.sharding import cuts_matrices, distributed_config_of, init_distributed

    warn_of_late_config()
    with expected_at(LOAD):
        sharding = distributed_config_of(kwargs)
        if sharding is not None:
            if is_pipeline(sharding):
                why = f"with pp_size={sharding.pp_size} ranks hold different models"
                warn_of_stock_load(why)
                return why
            because = cuts_matrices(sharding)
            return Choice(LOAD, "", partial(_load_sharded, ds_config, strict, init_distributed(), because))
    subject = f"{cls.__name__} from {path}"  # each rank may have a model of its own, of the same shape
    will_be_cut = _will_be_cut_by_autotp(ds_config)
    if (will_be_cut or (not ds_config and shards_by_fsdp2())) and not _placement_argument(kwargs):
        from .deferral import Deferral  # imports torch's FSDP2

        reader = "the first rank of each node" if is_fsdp_enabled() else "each rank"
        with expected_at(LOAD):
            settings = settings_for(ds_config, strict)
        # Ranks meet when the model is sharded. Until then they only need each other where one reads for others.
        meeting_kind = LOAD if mount_of(path) or settings.read_from != "all" else None
        load = Deferral.load_for_autotp if will_be_cut else partial(Deferral.load, stock_reader=reader)
        return Choice(meeting_kind, subject, partial(load, settings))
    has_group = is_one_of_several()
    if (has_group or announced_ranks() > 1) and (why := _stock_reason(kwargs)):
        warn_of_stock_load(why)
        return why
    if not has_group:
        warn_without_group(path)
        return ALONE if announced_ranks() <= 1 else "its ranks had no process group yet"
    with expected_at(LOAD):
        settings = settings_for(ds_config, strict)
    if settings.share_reads:
        return Choice(LOAD, subject, partial(_load_replicated, ds_config, settings))
    return "outside ZeRO-3 each rank has all of the model; with share_reads=True each reads a part of it for all"


def _will_be_cut_by_autotp(ds_config: Mapping[str, Any]) -> bool:
    """Whether ``deepspeed.initialize`` with `ds_config`, not of ZeRO-3, cuts whole models, and converts no experts."""
    size = (ds_config.get("tensor_parallel") or {}).get("autotp_size", 0)
    return isinstance(size, int) and size > 1 and not (ds_config.get("expert_parallel") or {}).get("enabled")


def choose_for_one_rank(
    path: Any, kwargs: Mapping[str, Any], ds_config: dict[str, Any], strict: bool | None
) -> Callable[[Coordinator], Load]:
    """Return the function that loads without other ranks what stock cannot: a whole model from a URL.

    Raises an UnsupportedError if the call asks for more than a whole model in host memory.
    """
    if what := _placement_argument(kwargs):
        raise UnsupportedError(
            f"{path}: with {what} this load is left to transformers, which cannot read weights from a URL. Leave it "
            "out and move the model afterwards, or download the checkpoint."
        )
    return partial(_load_replicated, ds_config, settings_for(ds_config, strict))


def _load_by_plugin(ds_config: dict[str, Any], settings: StreamingConfig, coordinator: Coordinator) -> Load:
    """A load into a destination that a plug-in brings."""
    places = {name: place for plugin in plugins() for name, place in plugin.destinations.items()}
    if settings.destination not in places:
        raise ConfigError(
            f"destination: expected one that a plug-in brings ({', '.join(sorted(places)) or 'none is installed'}); "
            f"got {settings.destination!r}. {broken_plugins()}".rstrip()
        )
    make: Callable[..., Destination] = import_object(places[settings.destination])
    return Load(settings, config_without_auto(ds_config), coordinator, make(coordinator, settings, ds_config))


def _load_partitioned(ds_config: dict[str, Any], strict: bool | None, coordinator: Coordinator) -> Load:
    from ..destinations.deepspeed import partitioned, zero3

    refuse_unsafe_partitions()
    settings, around, full_config = (
        settings_for(ds_config, strict),
        partitioned.open_init(),
        config_without_auto(ds_config),
    )
    if around is not None:
        full_config = partitioned.config_of(around, full_config if ds_config else {})
    load = Load(settings, full_config, coordinator, partitioned.Partitioned(full_config, coordinator, around=around))
    zero3.refuse_unsupported(full_config)
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


def _load_sharded(
    ds_config: dict[str, Any],
    strict: bool | None,
    device: torch.device,
    packing_unsupported_reason: str,
    coordinator: Coordinator,
) -> Load:
    from ..destinations.dtensor import DTensors  # imports torch's FSDP2

    settings = settings_for(ds_config, strict)
    shards = DTensors(
        coordinator,
        device,
        packing_unsupported_reason=packing_unsupported_reason,
        shares_columns=shares_columns(settings),
    )
    return Load(settings, config_without_auto(ds_config), coordinator, shards)


def shares_columns(settings: StreamingConfig) -> bool:
    """Whether ranks of tensor parallelism may read columns together; not if each compares what it holds with files."""
    return settings.verify in ("off", "sizes")


def _load_replicated(ds_config: dict[str, Any], settings: StreamingConfig, coordinator: Coordinator) -> Load:
    full_config = config_without_auto(ds_config)
    replicas: Destination
    if ds_config:
        from ..destinations.deepspeed.replicas import EngineReplicas

        replicas = EngineReplicas(full_config, coordinator, settings)
    else:
        from ..destinations.replicated import Replicated

        kind = accelerators.kind()
        device = (kind and accelerators.device_of_rank(kind, announced_local_rank())) or torch.device("cpu")
        replicas = Replicated(coordinator, settings, device)
    return Load(settings, full_config, coordinator, replicas)


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
