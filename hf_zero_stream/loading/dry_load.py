"""Loads that stop at the lazy model: ``plan()``, which reads no weights, :func:`lazily_loaded`, and a config alone."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from ..destinations.base import Batch, Destination
from ..destinations.skeleton import skeleton_of
from ..engine.load import Load
from ..errors import ConfigError, UnsupportedError, VersionError
from ..holdings.own_names import adapter_names, without_adapters
from ..planning.footprint import ADAMW_COPIES, AdamW, MemoryFootprint
from ..planning.plan import LoadPlan
from ..ranks.coordinator import Coordinator
from ..registry import tool
from ..reports.measures import collector_paused
from ..reports.tables import table_of_plan
from ..reports.text import Tabular
from ..seams.adapters import put_adapters_on
from ..seams.ds_config import zero3_hidden
from ..seams.session import LazyModel, Session, Stopped
from ..seams.sharding import cuts_matrices, device_type, distributed_config_of
from ..settings import scope
from ..settings.config import StreamingConfig, buildable_config, config_without_auto, refuse_settings
from ..settings.values import floating_dtype
from .arguments import MODEL_FILES, prefetching
from .choice import is_pipeline, refuse_pieces, refuse_sharding, settings_for, warn_of_open_dtype
from .integration import outside_zero_init


_OF_CONFIGS = ("revision", "token", "cache_dir", "subfolder", "local_files_only")
"""Arguments of ``from_pretrained`` that say where a checkpoint's config is."""


@dataclass(frozen=True)
class Forecast(Tabular):
    """The bytes that one rank will read, and the memory that it will need, in load and training (both computed)."""

    load: LoadPlan
    memory: MemoryFootprint

    def table(self) -> str:
        """The forecast for people to read: plain text in several lines of at most 80 columns."""
        return table_of_plan(self.load, self.memory)


def plan(
    path: str | os.PathLike[str],
    *,
    world_size: int,
    rank: int = 0,
    ds_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    distributed_config: Any = None,
    dtype: torch.dtype | str | None = None,
    device: str | None = None,
    adamw: AdamW | None = None,
    lora: Any = None,
    **kwargs: Any,
) -> Forecast:
    """The load plan and the memory of one rank of a world of any size; needs no process group and reads no weights.

    The model is built on the meta device, and transformers' own renames and conversions run over tensors that carry
    only their layout, exactly as in a load.

    Args:
        path: a checkpoint's folder or the id of a repository, as for ``from_pretrained``.
        world_size: number of ranks that share the checkpoint.
        rank: the rank to plan for.
        ds_config: a DeepSpeed config (dict or path), for the dtype that DeepSpeed gives to parameters, for the memory
            that its engine needs and for our settings.
        distributed_config: transformers' ``DistributedConfig`` (or a dict of its fields), for a model that is sharded
            by FSDP2, tensor or expert parallelism in place of ZeRO-3.
        dtype: dtype of the parameters where `ds_config` is not given, or leaves it open (``"bf16": {"enabled":
            "auto"}``, which accelerate and the Trainer fill in); default: the checkpoint's own, and where `ds_config`
            leaves it open fp32, with a warning.
        device: type of the device that will train ("cuda", "cpu"), for ``memory``; default: this machine's.
        adamw: how torch's AdamW steps, for ``memory.step_peak``, where `ds_config` does not say it: "single" (tensor
            by tensor), "foreach", or "fused" (the Trainer's default). Default: what torch chooses, which is "foreach"
            on a GPU and "single" on a CPU.
        lora: adapters that are put on the loaded model, and trained alone, for ``memory``: PEFT's ``LoraConfig``, or a
            dict of its arguments. Under ZeRO-3, which partitions them, and with ``fsdp_size`` alone: on a model
            that is sharded already they are whole on every rank.
        kwargs: anything else that ``from_pretrained`` takes (``revision``, ``trust_remote_code``, ...).

    Raises:
        ConfigError: `rank` is not below `world_size`, the stage of `ds_config` is not 3, the sizes in
            `distributed_config` do not make up `world_size`, `adamw` is none of the three, or PEFT does not take
            `lora`.
        HfZeroStreamError: the checkpoint is not sound.
        RuntimeError: it does not fit its model (transformers' own error, after its LOAD REPORT).

    Examples:
        >>> forecast = hf_zero_stream.plan("Qwen/Qwen3-30B-A3B", world_size=64, rank=37)
        >>> forecast.load.cost.bytes_read, forecast.memory.held
        >>> forecast = hf_zero_stream.plan(
        ...     "deepseek-ai/DeepSeek-V3", world_size=512, rank=37, distributed_config={"fsdp_size": 64, "tp_size": 8}
        ... )
    """
    path = os.fspath(path)
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank: expected 0 <= rank < world_size ({world_size}); got {rank}")
    if adamw is not None and adamw not in ADAMW_COPIES:
        raise ConfigError(f"adamw: expected one of {', '.join(ADAMW_COPIES)}; got {adamw!r}")
    refuse_settings(kwargs)
    wanted = None if dtype == "auto" else floating_dtype(dtype)
    coordinator = Coordinator(rank, world_size, alone=True)
    if distributed_config is not None:
        kwargs["distributed_config"] = distributed_config
    _check_tp_plan(kwargs)
    if (sharding := distributed_config_of(kwargs)) is not None:
        if is_pipeline(sharding):
            raise UnsupportedError(
                f"plan(): expected pp_size 1; got {sharding.pp_size}. With pipeline parallelism ranks hold different "
                "models, which are not streamed."
            )
        _check_world(sharding, world_size)
        if ds_config is not None:
            raise ConfigError("plan(): expected ds_config or distributed_config; got both")
        if lora is not None and (sharding.fsdp_size or 1) != world_size:
            raise ConfigError(
                "plan(lora=...): expected ZeRO-3, or distributed_config with fsdp_size alone; got other sizes, for "
                "which PEFT would make adapters of the sizes of shards"
            )
        training = {"trains_on": device or device_type(), "adamw": adamw}
        training["packing_unsupported_reason"] = cuts_matrices(sharding)
        arguments = {"dtype": wanted or "auto", **kwargs}
        return _plan_of_shards(path, coordinator, training, arguments, lora)
    refuse_sharding(path, kwargs)
    if find_spec("deepspeed") is None:
        raise VersionError(
            "plan(): a plan for ZeRO-3 needs DeepSpeed, which is not installed. Install it, or plan for FSDP2: "
            "distributed_config={'fsdp_size': ...}, on the command line --fsdp."
        )
    from ..destinations.deepspeed.partitioned import Partitioned  # imports deepspeed, which takes seconds

    found = {} if ds_config is None else _with_dtype(buildable_config(ds_config), wanted)
    if (stage := (found.get("zero_optimization") or {}).get("stage", 3)) != 3:
        raise ConfigError(f"plan(ds_config=...): expected zero_optimization.stage 3; got {stage!r}")
    config = config_without_auto(found) if found else {}
    destination = Partitioned(config, coordinator, trains_on=device, adamw=adamw)
    load = Load(settings_for(found, None), config, coordinator, destination)
    return _forecast(path, load, {"dtype": wanted or "auto", **kwargs}, lora)


def _forecast(path: str, load: Load, arguments: Mapping[str, Any], lora: Any = None) -> Forecast:
    with closing(load), collector_paused(), outside_zero_init():
        model, missing, tied = lazily_loaded(path, load, **arguments)
        load.make_plan(model, missing, tied, only_planned=True)
        assert load.plan is not None and load.footprint is not None
        return Forecast(load.plan, load.footprint if lora is None else _with_adapters(load, model, tied, lora))


def _with_adapters(load: Load, model: Any, tied: set[str], lora: Any) -> MemoryFootprint:
    """Compute the memory that the planned `model` needs if adapters are put on it after the load."""
    put_adapters_on(model, lora)
    trained = load.destination.footprint(model, tied, load.config)
    assert trained is not None and load.footprint is not None
    return replace(trained, load_peak=load.footprint.load_peak)


def _plan_of_shards(
    path: str, coordinator: Coordinator, training: Mapping[str, Any], arguments: Mapping[str, Any], lora: Any
) -> Forecast:
    from ..destinations.dtensor import DTensors  # imports torch's FSDP2
    from .fake_group import fake_group

    settings = settings_for({}, None)
    destination = DTensors(coordinator, torch.device("cpu"), **training, shares_reads=not settings.compares_values)
    load = Load(settings, {}, coordinator, destination)
    with fake_group(coordinator.rank, coordinator.world_size):
        return _forecast(path, load, arguments, lora)


def _check_tp_plan(kwargs: Mapping[str, Any]) -> None:
    config = kwargs.get("distributed_config")
    for given in (kwargs, config if isinstance(config, Mapping) else {}):
        if given.get("tp_plan") is not None and given.get("tp_size") is None:
            raise ConfigError("plan(tp_plan=...): expected tp_size too, which a launcher would announce; got none")


def _check_world(sharding: Any, world_size: int) -> None:
    sizes = {name: getattr(sharding, name, None) or 1 for name in ("dp_replicate_size", "fsdp_size", "tp_size")}
    if prod(sizes.values()) != world_size:
        product = " * ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigError(f"world_size: expected {prod(sizes.values())}, which is {product}; got {world_size}")


def _with_dtype(ds_config: dict[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """The config with `dtype` in place of "auto"; without a `dtype`, "auto" counts as off, with a warning."""
    from ..destinations.deepspeed import zero3

    sections = zero3.undecided(ds_config)
    if sections and dtype is None:
        warn_of_open_dtype(sections, "Pass plan(dtype=...) for another.")
    enabled = {"torch.bfloat16": ("bf16", "bfloat16"), "torch.float16": ("fp16",)}
    names = enabled.get(str(dtype), ())
    return {**ds_config, **{name: {**ds_config[name], "enabled": name in names} for name in sections}}


class _NoDestination(Destination):
    """Has no memory to fill; the lazy model gets the dtypes that it would have under ZeRO-3."""

    hides_zero3 = True

    def dtype(self, wanted: torch.dtype | None) -> torch.dtype | None:
        return wanted

    def batches(self, *args: Any, **kwargs: Any) -> list[Batch]:
        return []


def load_of_layouts(config: StreamingConfig) -> Load:
    """A load for :func:`lazily_loaded` of a model that is never read; needs no DeepSpeed."""
    return Load(config, {}, Coordinator(0, 1, alone=True), _NoDestination())


def lazily_loaded(
    path: str,
    load: Load,
    model_class: Any = None,
    *,
    is_quiet: bool = False,
    optional: Collection[str] = (),
    rename: Callable[[str], str] | None = None,
    **kwargs: Any,
) -> LazyModel:
    """The lazy model of the checkpoint at `path`, for :meth:`Load.place`; `load` gives the lazy tensors.

    Its class is `model_class`, or the one that the checkpoint was saved from. For the other arguments see
    :class:`..seams.session.Session`. Raises an UnsupportedError if the load would be left to stock.
    """
    session = Session(
        load,
        is_dry=True,
        strict=load.config.strict,
        is_quiet=is_quiet,
        optional=optional,
        rename=rename,
    )
    with zero3_hidden(), scope.inside(), prefetching(path, kwargs, MODEL_FILES), outside_zero_init():
        refuse_pieces(path, kwargs)
        cls = model_class or model_class_of(path, kwargs)
        try:
            with collector_paused(), session:
                cls.from_pretrained(path, **{"dtype": "auto", **kwargs})
        except Stopped as stopped:
            return stopped.lazy_model
    reason = session.stock_reason or "transformers loads it in another way"
    raise UnsupportedError(f"{path} cannot be streamed: {reason}.")


def lazily_loaded_like(model: Any, path: str, load: Load, *, dtype: torch.dtype, **kwargs: Any) -> LazyModel:
    """As :func:`lazily_loaded`, for a `model` that is in use: its class is not built anew, its own names are filled.

    The checkpoint may be one of the model before PEFT put adapters into it. Values come in `dtype`, or in the
    parameter's own one if that is wider. Those of a quantised checkpoint are dequantised.

    Raises an UnsupportedError if transformers cannot dequantise it.
    """
    skeleton = skeleton_of(model)
    for param in skeleton.parameters():
        if param.is_floating_point():
            param.data = param.data.to(torch.promote_types(param.dtype, dtype))

    def load_into_skeleton(cls: Any, /, path: str, **kwargs: Any) -> Any:
        if quantized := _quantization_config(path, kwargs):
            kwargs["config"].quantization_config = quantized
            dequantising = tool("dequantising", "packed", f"{path}: its quantization_config")
            kwargs["quantization_config"] = dequantising(quantized, kwargs.get("quantization_config"))
        return PreTrainedModel.from_pretrained.__func__(cls, path, **kwargs)

    own = {
        "__new__": lambda cls, *_, **__: skeleton,  # of another class, so that nothing is initialised
        "__module__": type(skeleton).__module__,
        "from_pretrained": classmethod(load_into_skeleton),  # not one of the class's own, which may do more
    }
    model_class = type(type(skeleton).__name__, (type(skeleton),), own)
    config = copy.deepcopy(model.config)
    vars(config).pop("distributed_config", None)  # by which transformers would shard the skeleton
    if adapters := adapter_names(model):
        kwargs = {"rename": without_adapters, "optional": adapters, **kwargs}
    return lazily_loaded(path, load, model_class, dtype=dtype, **{"config": config, **kwargs})


def _quantization_config(path: str, kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        config, _ = PreTrainedConfig.get_config_dict(path, **{n: kwargs[n] for n in _OF_CONFIGS if n in kwargs})
    except OSError:  # a folder of torch.distributed.checkpoint has no config, and one of GGUF need not have one
        return None
    found: dict[str, Any] | None = config.get("quantization_config")
    return found


def model_class_of(path: str, kwargs: Mapping[str, Any]) -> Any:
    """The class that the checkpoint was saved from, else the Auto class that its own code is registered for."""
    config = kwargs.get("config") or transformers.AutoConfig.from_pretrained(
        path, **{name: kwargs[name] for name in (*_OF_CONFIGS, "trust_remote_code") if name in kwargs}
    )
    architecture = (config.architectures or [""])[0]
    if hasattr(transformers, architecture):
        return getattr(transformers, architecture)
    own = [auto for auto, name in getattr(config, "auto_map", {}).items() if str(name).endswith(f".{architecture}")]
    return getattr(transformers, own[0] if own else "AutoModel")


def described_model(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model that the config in `folder` describes, without memory."""
    kwargs = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    config = transformers.AutoConfig.from_pretrained(folder, **kwargs)
    cls = model_class_of(str(folder), {"config": config, **kwargs})
    with torch.device("meta"):
        if hasattr(cls, "from_config"):  # an Auto class, for code of the model's own
            model: PreTrainedModel = cls.from_config(config, trust_remote_code=trust_remote_code)
        else:
            model = cls(config)
    if model.can_generate() and (folder / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model


def fitting(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], where: str) -> dict[str, torch.Tensor]:
    """`tensors` in the order of the state dict of `model`, but for the other names of what is tied.

    Raises:
        UnsupportedError: the model has other tensors, or of other shapes; `where` is its config.
    """
    ties = model.all_tied_weights_keys
    expected = model.state_dict()
    lacking = sorted(name for name in expected if name not in tensors and ties.get(name) not in tensors)
    unknown = sorted(name for name in tensors if name not in expected)
    other = sorted(
        name for name, tensor in tensors.items() if name in expected and expected[name].shape != tensor.shape
    )
    for names, what in ((lacking, "lacks"), (unknown, "has, and the model does not,"), (other, "has in other shapes")):
        if names:
            raise UnsupportedError(
                f"{where}: layout: of the tensors of a {type(model).__name__}, the checkpoint {what} "
                f"{', '.join(names[:8])} ({len(names)} in all). Give the config of the model that was trained, or "
                "keep the layout."
            )
    return {name: tensors[name] for name in expected if name in tensors and ties.get(name) not in tensors}
