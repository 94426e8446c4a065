"""What the usual ways to save become inside ``streaming()``: ``save_pretrained``, the Trainer's and accelerate's.

They end in ``model.save_pretrained(..., state_dict=...)`` with a state dict that was gathered on rank 0. Here that
state dict is lazy, and so saving it is for all ranks. The Trainer calls ``save_pretrained`` on one rank only, within a
``save_model`` that all of them call: there it is put off until ``save_model`` ends, and then done by all.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import extract_model_from_parallel
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from .. import patching
from ..checkpoint.lazy import LazyTensor
from ..checkpoint.nodes import View
from ..coordination import Coordinator
from ..errors import UnsupportedError
from ..seams.saving import NotedShard, is_noting


__all__ = ["REPLACEMENTS", "is_active", "trainer_patches"]

is_active: ContextVar[bool] = ContextVar("hf_zero_stream_saves", default=False)
"""Whether this thread is inside ``streaming()``."""

_put_off: ContextVar[list[dict[str, Any]] | None] = ContextVar("hf_zero_stream_put_off_saves", default=None)
_SIGNATURE = inspect.signature(PreTrainedModel.save_pretrained)


def _save_pretrained(original: Callable[..., Any], self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    arguments = _SIGNATURE.bind(self, *args, **kwargs).arguments
    if not _is_ours(arguments):
        return original(self, *args, **kwargs)
    extra = arguments.pop("kwargs", {})
    del arguments["self"]
    call = {"model": self, "folder": arguments.pop("save_directory"), **arguments, **extra}
    put_off = _put_off.get()
    if put_off is not None:
        put_off.append(call)
    else:
        _save(**call)
    return None


def _is_ours(arguments: Mapping[str, Any]) -> bool:
    """Whether a call of ``save_pretrained`` saves what ranks hold between them."""
    if not is_active.get() or is_noting() or arguments.get("distributed_checkpoint"):
        return False
    state_dict = arguments.get("state_dict")
    if state_dict is not None:
        return any(isinstance(value, LazyTensor) for value in state_dict.values())
    return any(hasattr(param, "ds_tensor") for param in arguments["self"].parameters())


def _save(model: Any, folder: Any, **kwargs: Any) -> None:
    from .save import Save  # imports deepspeed, which takes seconds

    Save(model, Path(folder)).pretrained(**kwargs)


def _get_state_dict(original: Callable[..., Any], self: Accelerator, model: Any, *args: Any, **kwargs: Any) -> Any:
    # If the Trainer calls, and was imported only now, rank 0 is going to save alone this once, and needs the values.
    if not is_active.get() or trainer_patches.put_in() or not _shares_its_model(model):
        return original(self, model, *args, **kwargs)
    from ..partition.stored import holdings
    from .parameters import lazy_parameters, lazy_state_dict

    unwrapped = extract_model_from_parallel(model, keep_torch_compile=False)
    held = holdings(unwrapped, masters=False, rank=dist.get_rank(), world_size=dist.get_world_size())
    return lazy_state_dict(unwrapped, lazy_parameters(held, _refuse_values), _refuse_values)


def _shares_its_model(engine: Any) -> bool:
    """Whether `engine` is DeepSpeed's, with ZeRO, around a model that transformers can save."""
    stage = getattr(engine, "zero_optimization_stage", lambda: 0)()
    return stage > 0 and isinstance(extract_model_from_parallel(engine, keep_torch_compile=False), PreTrainedModel)


def _refuse_values(view: View) -> torch.Tensor:
    raise UnsupportedError(
        "Inside streaming(), accelerator.get_state_dict() gives tensors that can be saved, by all ranks, with "
        "save_pretrained(..., state_dict=...), and whose values are not there. For the values themselves use "
        "deepspeed.zero.GatheredParameters, or call it outside streaming()."
    )


def _save_model(
    original: Callable[..., Any], self: Accelerator, model: Any, save_directory: Any, *args: Any, **kwargs: Any
) -> Any:
    """accelerate's function saves weights and no config, under the model's own names."""
    call = inspect.signature(original).bind(self, model, save_directory, *args, **kwargs)
    call.apply_defaults()
    if not is_active.get() or not _shares_its_model(model) or not call.arguments["safe_serialization"]:
        return original(self, model, save_directory, *args, **kwargs)
    from .parameters import lazy_state_dict
    from .save import Save

    unwrapped = extract_model_from_parallel(model, keep_torch_compile=False)

    def lay_out(folder: Path, parameters: Any) -> list[NotedShard]:
        noted: list[NotedShard] = []
        vars(self).update(
            get_state_dict=lambda *_, **__: lazy_state_dict(unwrapped, parameters.lazy, parameters.gather),
            save=lambda tensors, file, **_: noted.append(NotedShard(Path(file).name, tensors, {"format": "pt"})),
        )
        try:
            # Its look for parameters that are not there finds none: ZeRO-3's have no elements, but a device.
            original(self, model, folder, call.arguments["max_shard_size"])
        finally:
            del vars(self)["get_state_dict"], vars(self)["save"]
        return noted

    Save(model, Path(save_directory)).run(lay_out, SAFE_WEIGHTS_INDEX_NAME)
    return None


def _trainer_save_model(
    original: Callable[..., Any], self: Any, output_dir: Any = None, _internal_call: bool = False
) -> Any:
    if not is_active.get() or not _shares_its_model(getattr(self, "deepspeed", None)):
        return original(self, output_dir, _internal_call=_internal_call)
    error: BaseException | None = None
    with _putting_off() as calls:
        try:
            original(self, output_dir, _internal_call=True)
        except Exception as caught:
            error = caught
    _save_what_was_put_off(self.deepspeed, calls, error)
    if self.args.push_to_hub and not _internal_call:
        self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
    return None


@contextmanager
def _putting_off() -> Iterator[list[dict[str, Any]]]:
    calls: list[dict[str, Any]] = []
    token = _put_off.set(calls)
    try:
        yield calls
    finally:
        _put_off.reset(token)


def _save_what_was_put_off(engine: Any, calls: list[dict[str, Any]], error: BaseException | None) -> None:
    """All ranks save what rank 0 was asked to save; its state dict is the whole, or it would not be the Trainer's."""
    described = [
        {
            **{key: call[key] for key in call if key not in ("model", "state_dict")},
            "folder": os.path.abspath(call["folder"]),
        }
        for call in calls
    ]
    for call in Coordinator.of_default_group().exchange(described, error)[0]:
        _save(engine, **call)


REPLACEMENTS: dict[tuple[Any, str], patching.Make] = {
    (PreTrainedModel, "save_pretrained"): patching.function(_save_pretrained),
    (Accelerator, "get_state_dict"): patching.function(_get_state_dict),
    (Accelerator, "save_model"): patching.function(_save_model),
}


class TrainerPatches:
    """The same for the Trainer, which takes seconds to import: put in once somebody has imported it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._patches: patching.Patches | None = None

    def acquire(self) -> None:
        """Begin to replace, now or at the next :meth:`put_in`."""
        with self._lock:
            self._users += 1
        self.put_in()

    def put_in(self) -> bool:
        """Replace, if the Trainer has been imported; returns whether that was new."""
        with self._lock:
            trainer = sys.modules.get("transformers.trainer")
            if trainer is None or self._patches is not None or not self._users:
                return False
            self._patches = patching.Patches({(trainer.Trainer, "save_model"): patching.function(_trainer_save_model)})
            self._patches.acquire()
            return True

    def release(self) -> None:
        """Put the original back once every :meth:`acquire` has been released."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._patches is not None:
                self._patches.release()
                self._patches = None


trainer_patches = TrainerPatches()
