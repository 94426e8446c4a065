"""The function that vLLM calls in each of its processes, where this package is installed beside it."""

from __future__ import annotations

from .wire import BACKEND


def register() -> None:
    """Make the backend for weight transfer known; a vLLM that has none (before 0.28) is left alone."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "hf_zero_stream.plugins.stream.vllm_engine", "Engine")
