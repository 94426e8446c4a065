"""Loads that stop at the lazy model, and read no weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from ..destinations.base import Batch, Destination
from ..engine.load import Load
from ..errors import UnsupportedError
from ..holdings.own_names import adapter_names, without_adapters
from ..holdings.skeleton import skeleton_of
from ..ranks.coordinator import Coordinator
from ..registry import tool
from ..reports.measures import collector_paused
from ..seams.ds_config import zero3_hidden
from ..seams.session import LazyModel, Session, Stopped
from ..settings import scope
from ..settings.config import StreamingConfig
from .arguments import MODEL_FILES, prefetching
from .choice import refuse_pieces
from .integration import outside_zero_init


_OF_CONFIGS = ("revision", "token", "cache_dir", "subfolder", "local_files_only")
"""Arguments of ``from_pretrained`` that say where a checkpoint's config is."""


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
    """The lazy model of the checkpoint at `path`, for :meth:`Load.fill`; `load` gives the lazy tensors.

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
    return config.get("quantization_config")


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
