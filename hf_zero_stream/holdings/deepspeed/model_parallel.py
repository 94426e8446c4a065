"""Engines whose ranks hold different parts of one model: tensor parallelism, an `mpu`, stages of a pipeline.

They look like plain data parallelism: each rank has tensors under all names of the model. So the engine is asked what
its groups are, before anything is taken for a replica.
"""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from ...errors import UnsupportedError
from ..introspection import is_cut
from .autotp_shards import autotp_shard_of


_SIZES = {
    "get_model_parallel_world_size": "model parallelism",
    "get_tensor_model_parallel_world_size": "tensor parallelism",
    "get_slice_parallel_world_size": "tensor parallelism",
    "get_pipeline_model_parallel_world_size": "stages of a pipeline",
    "get_pipe_parallel_world_size": "stages of a pipeline",
}
"""What an `mpu` may say of its groups, under Megatron's names and DeepSpeed's own; one that has no such group may lack
the method.
"""


def unknown_shards_reason(trained: Any) -> str:
    """Why only DeepSpeed knows what the ranks of `trained` hold of its model; "" if it is no such engine."""
    if not isinstance(trained, DeepSpeedEngine):
        return ""
    if trained.autotp_size() > 1:
        return _unknown_autotp_reason(trained)
    for name, kind in _SIZES.items():
        size = getattr(trained.mpu, name, lambda: 1)()
        if size > 1:
            return f"its mpu has {kind} over {size} ranks, and says nothing of what each parameter is a part of"
    return ""


def is_model_parallel(engine: DeepSpeedEngine) -> bool:
    """Whether ranks of `engine` hold parts of its model, known or not."""
    return engine.autotp_size() > 1 or bool(unknown_shards_reason(engine))


def _unknown_autotp_reason(engine: Any) -> str:
    """Why it is not known what ranks hold where AutoTP has cut the model of `engine`; "" if it is."""
    combined = [("ZeRO-3", engine.zero_optimization_stage() == 3), ("experts", engine.has_moe_layers)]
    for kind, is_there in combined:
        if is_there:
            return f"the model is cut by AutoTP (tensor_parallel.autotp_size = {engine.autotp_size()}) and by {kind}"
    try:
        for name, param in engine.module.named_parameters():
            if is_cut(param):
                autotp_shard_of(name, param)
    except UnsupportedError as error:
        return str(error)
    return ""


def refuse_unknown_shards(trained: Any, doing: str) -> None:
    """Raise an UnsupportedError (``{doing}: ...``) if only DeepSpeed knows what ranks hold of the model."""
    if why := unknown_shards_reason(trained):
        raise UnsupportedError(
            f"{doing}: expected an engine whose ranks have the same model; {why}. Use DeepSpeed's own "
            "engine.save_checkpoint and engine.load_checkpoint (inside streaming() too), or what gathers its parts."
        )
