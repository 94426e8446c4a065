"""Asks DeepSpeed's engine whether its ranks hold parts of one model; without DeepSpeed, nothing is imported."""

from __future__ import annotations

import sys
from typing import Any


def why_parts(trained: Any) -> str:
    """Why only DeepSpeed knows what ranks hold of a model; "" if `trained` is no engine of such a kind."""
    if "deepspeed" not in sys.modules:
        return ""
    from .deepspeed import model_parallel

    return model_parallel.why_parts(trained)


def has_parts(engine: Any) -> bool:
    """Whether ranks of a DeepSpeed engine hold parts of its model."""
    from .deepspeed import model_parallel

    return model_parallel.has_parts(engine)


def refuse_parts(trained: Any, doing: str) -> None:
    """Raise an UnsupportedError (``{doing}: ...``) for an engine of which only DeepSpeed knows what ranks hold."""
    if "deepspeed" in sys.modules:
        from .deepspeed import model_parallel

        model_parallel.refuse_parts(trained, doing)
