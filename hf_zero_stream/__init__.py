"""Stream safetensors checkpoints straight into DeepSpeed ZeRO-3 partitions, and back."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from . import errors as errors


if "torch.optim.optimizer" in sys.modules:  # else steps are counted from the first use on
    from .bindings import history as _history  # noqa: F401

if TYPE_CHECKING:
    from .auto import *  # noqa: F403 - its stub names the classes
    from .bindings.streaming import streaming as streaming
    from .loading.into import load_into as load_into
    from .planning.plan import LoadPlan as LoadPlan
    from .plugins.forecast.plan import Forecast as Forecast
    from .plugins.forecast.plan import plan as plan
    from .plugins.hosts.states import HostStates as HostStates
    from .plugins.stream.sender import WeightSender as WeightSender
    from .plugins.stream.sender import weight_sender as weight_sender
    from .plugins.stream.weights import WeightStream as WeightStream
    from .plugins.stream.weights import weight_stream as weight_stream
    from .reports.load import LoadReport as LoadReport
    from .reports.save import SaveReport as SaveReport
    from .saving.calls import save_pretrained as save_pretrained
    from .saving.pending import PendingSave as PendingSave
    from .settings.config import StreamingConfig as StreamingConfig
    from .state.load import Resumed as Resumed
    from .state.load import load_state as load_state
    from .state.save import save_state as save_state
    from .tensors import load_tensors as load_tensors
    from .tensors import save_tensors as save_tensors

__version__ = "0.2.0"

# Imported at first use: transformers takes seconds to import, and a launcher's main process may never need it.
_HOMES = {
    "Forecast": ".plugins.forecast.plan",
    "HostStates": ".plugins.hosts.states",
    "LoadPlan": ".planning.plan",
    "LoadReport": ".reports.load",
    "PendingSave": ".saving.pending",
    "Resumed": ".state.load",
    "SaveReport": ".reports.save",
    "StreamingConfig": ".settings.config",
    "WeightSender": ".plugins.stream.sender",
    "WeightStream": ".plugins.stream.weights",
    "load_into": ".loading.into",
    "load_state": ".state.load",
    "load_tensors": ".tensors",
    "plan": ".plugins.forecast.plan",
    "save_pretrained": ".saving.calls",
    "save_state": ".state.save",
    "save_tensors": ".tensors",
    "streaming": ".bindings.streaming",
    "weight_sender": ".plugins.stream.sender",
    "weight_stream": ".plugins.stream.weights",
}


def _home_of(name: str) -> Any:
    """The module that a public name comes from; a MissingPluginError if the folder of its plug-in is gone."""
    home = _HOMES[name]
    if not _is_there(home):
        from .registry import missing_plugin_error

        raise missing_plugin_error(home.split(".")[2], f"{__name__}.{name}")
    return importlib.import_module(home, __name__)


def _instead_of(name: str) -> Any:
    from .settings.config import is_disabled

    if not is_disabled():
        return None
    from .off import instead_of

    return instead_of(name)


def _find(name: str) -> Any:
    if name == "__all__":  # with the classes that the installed transformers has
        from .auto import STREAMING_CLASSES

        return [*__dir__(), *STREAMING_CLASSES]
    found = None
    if name == "auto":
        return importlib.import_module(".auto", __name__)
    if name in _HOMES and (instead := _instead_of(name)) is not None:
        return instead
    if name in _HOMES:
        found = getattr(_home_of(name), name)
    elif name.startswith("StreamingAuto"):
        from .auto import STREAMING_CLASSES

        found = STREAMING_CLASSES.get(name)
    if found is not None:
        globals()[name] = found  # Python asks no more
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not TYPE_CHECKING:  # to a type checker, a module with a __getattr__ has every name
    __getattr__ = _find


def _is_there(home: str) -> bool:
    """Whether a module is there, as far as plug-ins can have been taken away."""
    _, first, second, *_ = *home.split("."), "", ""
    return first != "plugins" or os.path.isfile(os.path.join(os.path.dirname(__file__), first, second, "__init__.py"))


def __dir__() -> list[str]:
    """Without the StreamingAuto classes, which need transformers, and would hide the rest: `auto` has them."""
    there = [name for name, home in _HOMES.items() if _is_there(home)]
    return sorted([*there, "__version__", "auto", "errors"])
