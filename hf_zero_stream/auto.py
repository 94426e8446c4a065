"""One `Streaming<Name>` for each Auto model class of the installed transformers.

They differ from their parents in one point: `from_pretrained` runs inside `hf_zero_stream.streaming()`. Type checkers
read auto.pyi instead, which names the classes of the newest version that was tried.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Mapping
from typing import Any

from transformers.models.auto import modeling_auto


def _target(cls: type, streaming_class: type, parent: type) -> Any:
    # transformers looks `cls.__name__` up in the `auto_map` of checkpoints with their own code, and writes it there
    # when such a model is saved, so the class that runs must be called "AutoModel...". A user's subclass keeps its own
    # name and mapping, as a subclass of the parent would.
    return parent if cls is streaming_class else super(streaming_class, cls)


def _arguments(
    cls: type,
    pretrained_model_name_or_path: str | os.PathLike[str],
    *model_args: Any,
    ds_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    strict: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Show what `from_pretrained` takes, with what the parent's does not; nobody calls this."""


def _make_streaming_class(parent: Any) -> type:
    @functools.wraps(parent.from_pretrained.__func__)
    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        # This imports DeepSpeed, which `import hf_zero_stream.auto` must not do.
        from .bindings.streaming import streaming

        with streaming():
            return _target(cls, streaming_class, parent).from_pretrained(*args, **kwargs)

    vars(from_pretrained)["__signature__"] = inspect.signature(_arguments)

    @functools.wraps(parent.from_config.__func__)
    def from_config(cls: type, *args: Any, **kwargs: Any) -> Any:
        return _target(cls, streaming_class, parent).from_config(*args, **kwargs)

    name = f"Streaming{parent.__name__}"
    sentence = (
        "Under DeepSpeed ZeRO-3 each rank reads from the checkpoint only the bytes of the partitions it owns; "
        f"elsewhere several ranks share the reading; everything else is as in [`{parent.__name__}`]."
    )
    for function in (from_pretrained, from_config):
        function.__module__ = __name__
        function.__qualname__ = f"{name}.{function.__name__}"
    # Some Auto classes come without docstrings of their own.
    from_pretrained.__doc__ = "\n\n".join(filter(None, (inspect.getdoc(parent.from_pretrained), sentence)))
    namespace = {
        "__module__": __name__,
        "__qualname__": name,
        "__doc__": "\n\n".join(filter(None, (inspect.cleandoc(parent.__doc__ or ""), sentence))),
        "from_pretrained": classmethod(from_pretrained),
        "from_config": classmethod(from_config),
    }
    streaming_class = type(name, (parent,), namespace)
    return streaming_class


STREAMING_CLASSES: dict[str, type] = {
    f"Streaming{name}": _make_streaming_class(getattr(modeling_auto, name))
    for name in modeling_auto.__all__
    if inspect.isclass(getattr(modeling_auto, name))
}
"""Every streaming class by its name."""

globals().update(STREAMING_CLASSES)

__all__ = ["STREAMING_CLASSES", *STREAMING_CLASSES]
