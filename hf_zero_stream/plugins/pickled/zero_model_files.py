"""``*_model_states.pt`` in a ZeRO checkpoint of DeepSpeed, each read by itself; see :mod:`.zero_folder`.

It has what is not trained, and the names and shapes of what is. The format has no specification; it is what
DeepSpeed's engine saves (``runtime/engine.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import UnsupportedError
from ...plugin_api import ByteSource, TensorEntry, excerpt
from .pickles import object_kind
from .torch_objects import NotPlain, TorchObjects
from .zero_optimizer_files import BY_DEEPSPEED


_OF_THE_ENGINE = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps"),
    *("global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config"),
    *("ds_version", "universal_checkpoint_info", "num_experts", "ds_autoep_layers", "autoep_layers"),
}
"""Entries of a file of model states; all others are what the user gave as ``client_state``."""

_EXPERTS = ("num_experts", "ds_autoep_layers", "autoep_layers")


@dataclass(frozen=True)
class ModelFile:
    """The model file of one rank: what the optimizers' files lack, and the layout of what they have.

    Attributes:
        trained: for each sub-group of parameters that lie in one flat, their shapes, in their order there.
        tensors: the model's state dict as this rank has it; at stage 3 parameters are empty there.
        buffers: which of these are buffers.
        others: the names of its entries that are no tensors.
        frozen: shapes of the parameters that are not trained (stages 2 and 3).
        fragments: this rank's part of each of them.
        shared: other names of parameters.
        scheduler: its state; a text if it holds what is not plain.
        client_state: what the user gave, but for what is not plain (`left_out`).
    """

    path: str
    size_bytes: int
    world_size: int
    trained: Sequence[Mapping[str, tuple[int, ...]]]
    tensors: Mapping[str, TensorEntry]
    buffers: frozenset[str]
    others: Sequence[str]
    frozen: Mapping[str, tuple[int, ...]]
    fragments: Mapping[str, TensorEntry]
    shared: Mapping[str, str]
    counters: Mapping[str, int]
    scheduler: Mapping[str, Any] | str | None
    client_state: Mapping[str, Any]
    left_out: Sequence[str]


def read_model_file(source: ByteSource, path: str) -> ModelFile:
    """Read ``*_model_states.pt``, but no tensors; raises what ``read_optimizer_file`` raises."""
    with source.open_file(path) as file:
        objects = TorchObjects(file, path)
        root = objects.mapping(objects.root, "the file")
        _refuse_other_parallelism(objects, root)
        module = objects.mapping(objects.get(root, "the file", "module"), "module")
        scheduler: Any = root.get("lr_scheduler")
        try:
            scheduler = None if scheduler is None else objects.plain(scheduler, "lr_scheduler")
        except NotPlain as reason:
            scheduler = str(reason)
        client_state, left_out = _client_state(objects, root)
        return ModelFile(
            path,
            file.size_bytes,
            objects.count(root.get("dp_world_size"), "dp_world_size"),
            [
                _shapes(objects, each, "param_shapes")
                for each in objects.sequence(objects.get(root, "the file", "param_shapes"), "param_shapes")
            ],
            _tensors(objects, module, "module"),
            frozenset(
                objects.name(each, "buffer_names")
                for each in objects.sequence(root.get("buffer_names", []), "buffer_names")
            ),
            [
                objects.name(name, "module")
                for name, each in module.items()
                if not objects.is_tensor(each) and each not in (None, {}, [], (), b"", "")
            ],
            _shapes(objects, root.get("frozen_param_shapes") or {}, "frozen_param_shapes"),
            _tensors(objects, root.get("frozen_param_fragments") or {}, "frozen_param_fragments"),
            {
                objects.name(alias, "shared_params"): objects.name(name, "shared_params")
                for alias, name in objects.mapping(root.get("shared_params") or {}, "shared_params").items()
            },
            {name: objects.count(root[name], name) for name in _COUNTERS if root.get(name) is not None},
            scheduler,
            client_state,
            left_out,
        )


_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def _refuse_other_parallelism(objects: TorchObjects, root: Mapping[Any, Any]) -> None:
    sizes = {"mp_world_size": root.get("mp_world_size", 1)}
    sizes |= objects.mapping(root.get("checkpoint_parallel_dimensions") or {}, "checkpoint_parallel_dimensions")
    for name, size in sizes.items():
        if size not in (1, None):
            raise UnsupportedError(
                f"{objects.path}: {excerpt(name)}: expected 1, found {object_kind(size)}: each rank has a part of the "
                "model itself (tensor or pipeline parallelism), not only of its parameters. Use DeepSpeed's own tools."
            )
    for name in _EXPERTS:
        if root.get(name):
            raise UnsupportedError(f"{objects.path}: {name}: ranks have different experts. {BY_DEEPSPEED}")


def _shapes(objects: TorchObjects, value: Any, what: str) -> dict[str, tuple[int, ...]]:
    return {
        objects.name(name, what): objects.sizes(shape, f"{what} of {name}")
        for name, shape in objects.mapping(value, what).items()
    }


def _tensors(objects: TorchObjects, value: Any, what: str) -> dict[str, TensorEntry]:
    """Select the entries that are tensors: modules may keep other extra state (``ModelFile.others``)."""
    named = {objects.name(name, what): each for name, each in objects.mapping(value, what).items()}
    return {name: objects.tensor(each, name) for name, each in named.items() if objects.is_tensor(each)}


def _client_state(objects: TorchObjects, root: Mapping[Any, Any]) -> tuple[dict[str, Any], list[str]]:
    kept, left_out = {}, []
    for name, value in root.items():
        if name in _OF_THE_ENGINE or not isinstance(name, str):
            continue
        try:
            kept[name] = objects.plain(value, name, exactly=True)
        except NotPlain:
            left_out.append(name)
    return kept, left_out
