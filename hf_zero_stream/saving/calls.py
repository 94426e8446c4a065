"""What a call of ``model.save_pretrained`` becomes: a save by all ranks, of what they hold between them.

Usually all ranks make the call. But the Trainer makes it on rank 0 only, and a model's class may have a
``save_pretrained`` of its own, which does something with the files afterwards. Such code is :func:`led`: rank 0 alone
runs it, the others wait, and each save that it comes to is carried out by all ranks there and then.
"""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from .. import patching
from ..checkpoint.lazy import LazyTensor
from ..checkpoint.nodes import View
from ..destinations.deepspeed.marks import has_partition
from ..errors import UnsupportedError
from ..ranks.coordinator import Coordinator, expected_at
from ..ranks.rendezvous import SAVE
from ..scope import active_configs
from ..seams.saving import is_noting
from ..seams.wrappers import unwrapped


if TYPE_CHECKING:
    from ..reports.save import SaveReport


__all__ = ["has_own_save_pretrained", "is_led", "led", "patches", "refuse_values", "save_as_led"]

_SIGNATURE = inspect.signature(PreTrainedModel.save_pretrained)
_OF_THE_CALLER = ("is_main_process", "save_function")
"""Arguments that say how to write; they are not passed on to other ranks."""


def _save_pretrained(original: Callable[..., Any], self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    bound = _SIGNATURE.bind(self, *args, **kwargs)
    arguments = bound.arguments
    if not _is_ours(arguments):
        return original(self, *args, **kwargs)
    leader = _leader.get()
    if leader is None and arguments.get("state_dict") is None:
        from .gathered import is_gathered_whole  # imports deepspeed, which takes seconds

        if is_gathered_whole(self):
            # Of several callers rank 0 writes, as in newer versions of transformers.
            arguments["is_main_process"] = arguments.get("is_main_process", True) and dist.get_rank() == 0
            return original(*bound.args, **bound.kwargs)
    given = {name: value for name, value in arguments.items() if name not in ("self", "save_directory", "kwargs")}
    call = {"folder": arguments["save_directory"], **given, **arguments.get("kwargs", {})}
    if leader is None:
        _save(self, **call)
    else:
        leader.save(self, call)
    return None


def _is_ours(arguments: Mapping[str, Any]) -> bool:
    """Whether a call of ``save_pretrained`` saves what ranks hold between them."""
    if is_noting():
        return False
    leader = _leader.get()
    if leader is not None and leader.takes_all:
        return True
    if not active_configs() or arguments.get("distributed_checkpoint"):
        return False
    state_dict = arguments.get("state_dict")
    if state_dict is not None:
        return any(isinstance(value, LazyTensor) for value in state_dict.values())
    return any(map(has_partition, arguments["self"].parameters()))


def _save(
    model: Any,
    folder: Any,
    *,
    dtype: torch.dtype | None = None,
    write_from: str | None = None,
    chunk_bytes: int | None = None,
    **kwargs: Any,
) -> SaveReport:
    from .save import CHUNK_BYTES, Save

    with expected_at(SAVE):
        save = Save(model, Path(folder), dtype=dtype, write_from=write_from, chunk_bytes=chunk_bytes or CHUNK_BYTES)
        return save.pretrained(**kwargs)


patches = patching.Patches({(PreTrainedModel, "save_pretrained"): _save_pretrained})
"""In while a thread is inside ``streaming()``, or saves a model whose class has a ``save_pretrained`` of its own."""


def has_own_save_pretrained(model: Any) -> bool:
    """Whether the model's class does more than transformers' ``save_pretrained``."""
    return type(model).save_pretrained is not PreTrainedModel.save_pretrained


def refuse_values(view: View) -> torch.Tensor:
    """In place of values that a lazy tensor cannot give.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        "This state dict is lazy: accelerator.get_state_dict() gives such a one inside streaming(), and a "
        "save_pretrained of a model's own is given one. Its tensors can be saved, by all ranks, with "
        "save_pretrained(..., state_dict=...), and their values are not there. For the values themselves use "
        "deepspeed.zero.GatheredParameters, or call accelerator.get_state_dict() outside streaming()."
    )


# --------------------------------------------------------------------------------------------------- rank 0 leads


def led(model: Any, work: Callable[[], Any], *, takes_all: bool = False, **settings: Any) -> SaveReport | None:
    """Run `work` on rank 0; the saves that it comes to are carried out by all ranks, which must call this together.

    Args:
        model: what is saved.
        work: calls ``save_pretrained`` any number of times.
        takes_all: also those calls that would be left to transformers, because each rank holds all of the model.
        settings: of a save, for all of them.

    Returns:
        The report of the last save.

    Raises:
        HfZeroStreamError: on all ranks, if a save failed on any, or `work` on rank 0, which raises its own error.
    """
    if not Coordinator.of_default_group().is_main:
        return _follow(model)
    leader = _Leader(model, takes_all, settings)
    token = _leader.set(leader)
    error: BaseException | None = None
    patches.acquire()
    try:
        work()
    except BaseException as caught:  # Ctrl-C too: the other ranks would wait for this one
        error = caught
    finally:
        patches.release()
        _leader.reset(token)
    leader.end(error)
    return leader.report


def is_led() -> bool:
    """Whether this thread runs what other ranks wait for, in :func:`led`."""
    return _leader.get() is not None


def save_as_led(model: Any, folder: Any, **arguments: Any) -> SaveReport:
    """Save with the ranks that wait for this thread."""
    leader = _leader.get()
    assert leader is not None
    return leader.save(model, {"folder": folder, **arguments})


class _Failed(BaseException):
    """A save has failed, on whichever rank, and all ranks know: nothing that rank 0 does can mend it.

    Not an ``Exception``: the Trainer takes a ``ValueError`` for a wish to save in another way, on rank 0 alone.
    """


class _Leader:
    """Rank 0 while the others follow."""

    def __init__(self, model: Any, takes_all: bool, settings: Mapping[str, Any]) -> None:
        self._model = model
        self.takes_all = takes_all
        self.report: SaveReport | None = None
        self._settings = settings
        self._failure: BaseException | None = None
        self._meet()

    def _meet(self) -> None:
        """Be seen to live by the others, until the next save, which watches for itself."""
        self._coordinator = Coordinator.of_default_group()
        self._watched = ExitStack()
        self._watched.enter_context(_coming_together(self._model, self._coordinator))

    def save(self, model: Any, call: Mapping[str, Any]) -> SaveReport:
        """Carry out one save with all ranks.

        Raises:
            UnsupportedError: `model` is no part of what is being saved.
        """
        if self._failure is not None:
            raise _Failed from self._failure
        own = {name: value for name, value in call.items() if name not in _OF_THE_CALLER}
        call = {**self._settings, **own, "part": self._name_of(model)}
        try:
            with self._watched:
                if not self._coordinator.is_alone:
                    self._coordinator.broadcast(lambda: pickle.dumps(_described(call)))
            self.report = _save_part(self._model, call)
            self._meet()
        except BaseException as error:
            self._failure = error
            raise _Failed from error
        return self.report

    def _name_of(self, model: Any) -> str:
        """The name of the module that is saved, which the other ranks have too."""
        model = unwrapped(model)
        whole = unwrapped(self._model)
        for name, module in whole.named_modules():
            if module is model:
                return name
        raise UnsupportedError(
            f"save_pretrained: rank 0 saves a {type(model).__name__} that is no part of the {type(whole).__name__} "
            "that all ranks are saving, so the others cannot take part. Save it by a call of its own, on all ranks."
        )

    def end(self, error: BaseException | None) -> None:
        """Tell the others that there is no more to save; raise what they raise."""
        if self._failure is not None:
            raise self._failure  # they know, whatever became of it here
        with self._watched:
            if error is not None:
                self._coordinator.agree(error)
            self._coordinator.broadcast(_nothing)


_leader: ContextVar[_Leader | None] = ContextVar("hf_zero_stream_leader", default=None)


def _follow(model: Any) -> SaveReport | None:
    report = None
    while True:
        coordinator = Coordinator.of_default_group()
        with _coming_together(model, coordinator):
            call = coordinator.broadcast(_nothing)
        if call is None:
            return report
        with expected_at(SAVE):
            report = _save_part(model, _understood(pickle.loads(call)))


def _save_part(model: Any, call: Mapping[str, Any]) -> SaveReport:
    arguments = dict(call)
    part = arguments.pop("part")
    whole = unwrapped(model)
    return _save(whole.get_submodule(part) if part else model, **arguments)


def _nothing() -> bytes | None:
    """What rank 0 shares when there is no more to save."""
    return None


def _coming_together(model: Any, coordinator: Coordinator) -> AbstractContextManager[None]:
    """All ranks are here, and watch each other, until the context ends."""
    from .gathered import occasion_to_save  # imports deepspeed, which takes seconds

    return coordinator.watched(occasion_to_save(unwrapped(model), coordinator))


def _described(call: Mapping[str, Any]) -> dict[str, Any]:
    """`call` as data: a lazy tensor becomes what it is a view of."""
    state_dict = call.get("state_dict")
    if state_dict is not None:
        state_dict = {
            name: value.view_of_node if isinstance(value, LazyTensor) else value for name, value in state_dict.items()
        }
    return {**call, "folder": os.path.abspath(call["folder"]), "state_dict": state_dict}


def _understood(call: Mapping[str, Any]) -> dict[str, Any]:
    state_dict = call.get("state_dict")
    if state_dict is not None:
        state_dict = {
            name: LazyTensor.of(value, refuse_values) if isinstance(value, View) else value
            for name, value in state_dict.items()
        }
    return {**call, "state_dict": state_dict}
