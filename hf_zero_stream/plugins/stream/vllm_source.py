"""A weight stream as vLLM's trainer engines take one: in the shape of its ``WeightSource``, which changed in 0.33."""

from __future__ import annotations

from functools import cached_property
from itertools import chain
from typing import Any

from ...errors import refuse_unknown_version


def weight_source(stream: Any) -> Any:
    """A ``WeightSource`` of the installed vLLM; its iteration is a pass over `stream`, a WeightStream (all ranks)."""
    from vllm.distributed import weight_transfer

    names = ("ParamMeta", "WeightSource")
    refuse_unknown_version("vllm", [name for name in names if not hasattr(weight_transfer, name)], "weight_source")
    described, source = weight_transfer.ParamMeta, weight_transfer.WeightSource

    def pairs(self: Any) -> Any:
        return chain.from_iterable(stream)

    if hasattr(source, "iter_full"):
        metadata = cached_property(
            lambda self: [described(each.name, each.dtype, each.shape, owners=each.owners) for each in stream.metadata]
        )
        own: dict[str, Any] = {"metadata": metadata, "iter_full": pairs}
    else:
        own = {
            "metadata": lambda self: [described(each.name, each.dtype, each.shape) for each in stream.metadata],
            "__iter__": pairs,
        }
    return type("StreamSource", (source,), own)()
