"""Turns ``from_pretrained`` into a streaming load inside ``streaming()`` (for saving see ``saving/hooks.py``)."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import modeling_utils
from transformers.utils import logging

from ..checkpoint.formats import has_unfinished
from ..errors import PACKAGE
from ..holdings.introspection import is_inside_zero_init
from ..ranks.coordinator import Coordinator, expected_at, meeting
from ..ranks.rendezvous import LOAD
from ..reports.closing import tell_of_stock
from ..reports.measures import collector_paused
from ..seams.ds_config import ModelsConfig, active_config, zero3_hidden
from ..seams.loading import raise_if_misfit
from ..seams.session import Original, Session
from ..settings import scope
from ..settings.config import buildable_config
from ..sources.by_path import mount_of, mounted_by_plugin
from .arguments import MODEL_FILES, load_with_prefetch, model_of, url_of
from .choice import Choice, Way, choose, for_one_rank, make_load, refuse_pieces


logger = logging.get_logger(__name__)

Stock = Callable[..., Any]
"""transformers' ``from_pretrained``, with its positional arguments."""


def from_pretrained(original: Original, cls: Any, *args: Any, **kwargs: Any) -> Any:
    """``PreTrainedModel.from_pretrained``, perhaps in the ``__init__`` of a model that is being loaded."""
    around = Session.current()
    if not scope.active_configs() or (around is not None and not around.is_building):
        return original(cls, *args, **kwargs)
    stock = functools.partial(load_with_prefetch, MODEL_FILES, original, cls, *args)
    path = args[0] if args else kwargs.get("pretrained_model_name_or_path")
    ds_config, strict = kwargs.pop("ds_config", None), kwargs.pop("strict", None)
    if around is not None:
        return _nested(around, stock, path, kwargs, bool(strict))
    if ds_config is None:
        return _load(cls, stock, path, kwargs, strict, None)
    ds_config = _buildable(ds_config)
    with _expected_if_for_all(ds_config):  # the stage is known now, if the config was a file's path
        own_config = ModelsConfig(ds_config)
    try:
        result = _load(cls, stock, path, kwargs, strict, own_config)
    except BaseException:
        own_config.withdraw()
        raise
    model_of(result)._hf_zero_stream_ds_config = own_config
    return result


def auto_model(original: Original, *args: Any, **kwargs: Any) -> Any:
    """An Auto class's ``from_pretrained``: it reads the config, then calls that of the model's class.

    A config that one rank cannot read ends a load under ZeRO-3 for all ranks, which else would wait for this one.
    """
    if not scope.active_configs() or Session.current() is not None:
        return original(*args, **kwargs)
    ds_config = kwargs.get("ds_config")
    if ds_config is not None:
        ds_config = kwargs["ds_config"] = _buildable(ds_config)
    with _expected_if_for_all(ds_config):
        return original(*args, **kwargs)


def _buildable(ds_config: Any) -> dict[str, Any]:
    with _expected_if_for_all(ds_config):
        return buildable_config(ds_config)


def _expected_if_for_all(ds_config: Any) -> AbstractContextManager[None]:
    """:func:`expected_at` a load, if one under `ds_config`, not validated yet, is for all ranks, as ZeRO-3's; or if it
    may be."""
    if is_inside_zero_init():
        is_for_all = True
    elif ds_config is None:
        is_for_all = active_config()[1]
    else:
        zero = ds_config.get("zero_optimization", {}) if isinstance(ds_config, Mapping) else None
        stage = zero.get("stage", 0) if isinstance(zero, Mapping) else None
        is_for_all = str(stage) not in ("0", "1", "2")
    return expected_at(LOAD) if is_for_all else nullcontext()


def _nested(around: Session, stock: Stock, path: Any, kwargs: dict[str, Any], strict: bool) -> Any:
    """A call in the ``__init__`` of the model that `around` builds, by the settings of that model's load.

    If that model is not built lazily, the call is left to transformers, which outside ZeRO-3 has an error for it.
    """
    is_lazy = around.is_dry or around.inside is not None or around.load.destination.hides_zero3
    if around.stock_reason or not is_lazy:
        return _stock_from_pretrained(stock, kwargs, strict)
    around.has_nested = True
    _refuse_device_map(kwargs)
    refuse_pieces(path, kwargs)
    # Without one transformers takes the context in which the model is built, the meta device, for a mistake.
    kwargs["device_map"] = torch.device("cpu")
    with Session(around.load, inside=around, strict=strict):
        finish_saves_into(path, around.load.config.read_from, around.load.coordinator)
        return stock(**kwargs)


def _refuse_device_map(kwargs: Mapping[str, Any]) -> None:
    """Raise what stock raises for a `device_map`, which transformers also makes for a model that it shards."""
    is_refused = kwargs.get("device_map") is not None
    if any(kwargs.get(name) is not None for name in ("distributed_config", "tp_plan", "tp_size")):
        from ..seams.sharding import distributed_config_of

        is_refused = is_refused or distributed_config_of(kwargs) is not None
    if is_refused:
        raise ValueError("DeepSpeed Zero-3 is not compatible with passing a `device_map`.")  # transformers' words


def _load(
    cls: Any, stock: Stock, path: Any, kwargs: dict[str, Any], strict: bool | None, own_config: ModelsConfig | None
) -> Any:
    """Stream, together with the other ranks; or leave the load to stock."""
    ds_config, is_zero3 = active_config(own_config)
    choice = choose(cls, path, kwargs, ds_config, strict, is_zero3=is_zero3 or is_inside_zero_init())
    if choice.way is Way.STOCK:
        if not url_of(path, kwargs) and not mount_of(path):  # which stock cannot read
            result = _stock_from_pretrained(stock, kwargs, choice.settings.strict)
            tell_of_stock(model_of(result), choice.reason)
            return result
        choice = for_one_rank(choice, path, kwargs)
    if not choice.is_joint:
        return _stream(choice, Coordinator.of_this_rank(), stock, path, kwargs)
    with meeting(LOAD, choice.subject) as coordinator:
        return _stream(choice, coordinator, stock, path, kwargs)


@collector_paused()
def _stream(choice: Choice, coordinator: Coordinator, stock: Stock, path: Any, kwargs: dict[str, Any]) -> Any:
    """Call stock's `from_pretrained`, in which our seams make it stream."""
    load = make_load(choice, coordinator)
    finish_saves_into(path, load.config.read_from, load.coordinator)
    hides_zero3 = load.destination.hides_zero3
    if hides_zero3:
        _refuse_device_map(kwargs)
    # A context with the host as torch's default device would slow every function of torch.
    on_the_host = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    session = Session(load, strict=load.config.strict)
    # inference_mode is off: other threads and training write to the partitions later.
    with (
        closing(load),
        mounted_by_plugin(path, coordinator),
        zero3_hidden(),
        outside_zero_init(),
        session,
        load.memory,
        load.clock("total"),
        torch.inference_mode(False),
        on_the_host,
    ):
        if hides_zero3:
            # transformers' own tests look for this line, which it logs where it finds ZeRO-3.
            modeling_utils.logger.info("Detected DeepSpeed ZeRO-3: activating zero.init() for this model")
            if load.config.random_numbers == "stock":
                from ..seams.building import drawing_as_stock

                session.while_building.enter_context(drawing_as_stock(load.destination.device))
        result = stock(**kwargs)
    if session.stock_reason:
        load.coordinator.require_same("stock")
        tell_of_stock(model_of(result), session.stock_reason)
    else:
        session.refuse_incomplete()
        model = model_of(result)
        model.streaming_report = load.finish(model, logger)
    return result


def outside_zero_init() -> AbstractContextManager[None]:
    """Suspend a ``zero.Init`` that the caller is in, which would partition the lazy model while it is built."""
    if not is_inside_zero_init():
        return nullcontext()
    from ..holdings.deepspeed import zero_init  # imports deepspeed, which takes seconds

    return zero_init.outside_zero_init()


def finish_saves_into(
    path: Any, read_from: str, coordinator: Coordinator, then: Callable[[], Any] = lambda: None
) -> Any:
    """Have rank 0 finish a save into the folder `path` that died while it gave files their final names.

    Returns what `then` gives on rank 0 after that. This is the first time that the ranks of a load agree. So it also
    compares `read_from`, on which the later ones depend, and raises a DisagreementError on all ranks if one has
    another.
    """
    if f"{PACKAGE}.saving.pending" in sys.modules:
        from ..saving.pending import finish_pending

        finish_pending(raises=False)

    def finish() -> tuple[list[str], Any]:
        finished: list[str] = []
        if path is not None and has_unfinished(Path(path)):
            from ..saving.publication import finish_interrupted

            finished = finish_interrupted(Path(path))
        return finished, then()

    finished, result = coordinator.broadcast(finish, same=f"read_from={read_from!r}")
    if finished and coordinator.is_main:
        logger.warning(f"{path}: an interrupted save was complete; its files have their final names now.")
    return result


def _stock_from_pretrained(stock: Stock, kwargs: dict[str, Any], strict: bool) -> Any:
    """Stock's own call, after which we carry out `strict`, an argument that it does not know."""
    if not strict:
        return stock(**kwargs)
    wants_info = kwargs.pop("output_loading_info", False)
    model, info = stock(output_loading_info=True, **kwargs)
    raise_if_misfit(info["missing_keys"], info["unexpected_keys"], info["mismatched_keys"])
    return (model, info) if wants_info else model
