"""What DeepSpeed's own conversion of experts needs to run beside the installed transformers."""

from typing import Any


def let_autoep_run() -> None:
    """DeepSpeed 0.19.8 gives a default to the `get` of transformers' table of recorders, which 5.23 does not take."""
    from transformers.utils import output_capturing

    class Table(dict):
        def get(self, key: Any, default: Any = None) -> Any:
            return super().get(key, default) if isinstance(key, str) else super().get(str(key.__class__)) or {}

    output_capturing._CAN_RECORD_REGISTRY = Table(output_capturing._CAN_RECORD_REGISTRY)
