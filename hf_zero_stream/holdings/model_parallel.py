"""Asks DeepSpeed's engine whether its ranks hold parts of one model; without DeepSpeed, nothing is imported."""

from __future__ import annotations

import sys
from typing import Any


def unknown_shards_reason(trained: Any) -> str:
    """Why only DeepSpeed knows what ranks hold of a model; "" if `trained` is no engine of such a kind."""
    if "deepspeed" not in sys.modules:
        return ""
    from .deepspeed import model_parallel

    return model_parallel.unknown_shards_reason(trained)


def is_model_parallel(engine: Any) -> bool:
    """Whether ranks of a DeepSpeed engine hold parts of its model."""
    from .deepspeed import model_parallel

    return model_parallel.is_model_parallel(engine)


def refuse_unknown_shards(trained: Any, doing: str) -> None:
    """Raise an UnsupportedError (``{doing}: ...``) for an engine of which only DeepSpeed knows what ranks hold."""
    if "deepspeed" in sys.modules:
        from .deepspeed import model_parallel

        model_parallel.refuse_unknown_shards(trained, doing)
