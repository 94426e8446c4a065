"""Whether stock transformers would load a checkpoint rightly with ``distributed_config``; reads no weights.

Stock cuts the tensors of a checkpoint as the first parameter that they end in is sharded, and converts the pieces.
Where a conversion splits or permutes what was cut, a rank gets elements that are not its own, without an error. Here
both orders run over lazy tensors, and what they give is compared element by element.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import closing
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..checkpoint.lazy import LazyTensor
from ..checkpoint.nodes import Computed, FileTensor, Leaf, Pointwise, View
from ..config import StreamingConfig
from ..destinations.base import Batch, Destination, narrowed, source_of
from ..engine.load import Load
from ..errors import UnsupportedError
from ..planning.boxes import Box, Region, regions_of_range
from ..planning.parameter_box import Cut, ParameterBox
from ..ranks.coordinator import Coordinator
from ..ranks.stand_in import stand_in_group
from ..seams.sharding import is_known
from .dry_load import lazily_loaded, load_of_layouts


_WORLD = 2
_SAMPLES = 256
"""Elements that are compared besides the corners of all regions."""


class StockShards(NamedTuple):
    """What becomes of sharded parameters in a load by stock, by name.

    Attributes:
        wrong: a rank gets other elements than its own, and no error.
        refused: the load fails, because a conversion fails or gives another shape.
        unknown: their conversion computes values from whole tensors, so that elements cannot be followed.
    """

    wrong: list[str]
    refused: list[str]
    unknown: list[str]


def stock_shards(path: str, **kwargs: Any) -> StockShards:
    """What stock would make of the checkpoint at `path` under FSDP2 with two ranks.

    Raises:
        UnsupportedError: this version of transformers shards models in another way.
        ValueError: transformers cannot shard this model by FSDP2.
    """
    if not is_known():
        raise UnsupportedError(
            "distributed_config: this version of transformers shards models in a way not known here"
        )
    config = StreamingConfig(progress=False)
    with closing(load_of_layouts(config)) as load:
        model, _, _ = lazily_loaded(path, load, **kwargs)
        views = {name: view for name, param in _named(model) if (view := source_of(param)) is not None}
        verdicts: dict[str, str] = {}
        for rank in range(_WORLD):
            found, sharded = _stock_values(path, config, rank, kwargs)
            for name in sharded & views.keys():
                view = views[name]
                box = ParameterBox.of_cuts(view.sizes, [Cut(0, _WORLD, rank)])
                verdict = _verdict(found.get(name), narrowed(view, box))
                verdicts[name] = max(verdict, verdicts.get(name, ""), key=("", "unknown", "wrong", "refused").index)
    return StockShards(*([name for name in views if verdicts.get(name) == kind] for kind in StockShards._fields))


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return model.named_parameters(remove_duplicate=False)


class _StockShards(Destination):
    """Has no memory to fill; transformers may shard the model."""

    takes_dtensors = True

    def batches(self, *args: Any, **kwargs: Any) -> list[Batch]:
        return []


def _stock_values(
    path: str, config: StreamingConfig, rank: int, kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], set[str]]:
    """What stock would put in place of parameters on `rank`, and the names of the parameters that are sharded."""
    values: dict[str, Any] = {}
    with (
        stand_in_group(rank, _WORLD),
        closing(Load(config, {}, Coordinator(rank, _WORLD, alone=True), _StockShards())) as load,
    ):
        arguments = {**kwargs, "distributed_config": {"fsdp_size": _WORLD}}
        model, _, _ = lazily_loaded(path, load, stock_values=values, **arguments)
        return values, {name for name, param in _named(model) if isinstance(param, DTensor)}


def _verdict(found: Any, expected: View) -> str:
    """Of one parameter on one rank: "" if stock is right, else a field of :class:`StockShards`."""
    if isinstance(found, list):
        (found,) = found
    if not isinstance(found, torch.Tensor) or tuple(found.shape) != expected.sizes:
        return "refused"
    if not isinstance(found, LazyTensor):
        return "unknown"
    return _compared(found.view_of_node, expected)


def _compared(found: View, expected: View) -> str:
    theirs, ours = (list(regions_of_range(view, 0, view.numel)) for view in (found, expected))
    if list(map(_key, theirs)) == list(map(_key, ours)):
        return ""
    evenly = range(0, expected.numel, max(1, expected.numel // _SAMPLES))
    for element in sorted({*evenly, *_corners(theirs), *_corners(ours)}):
        theirs_from, ours_from = _origin(found, element), _origin(expected, element)
        if None in (theirs_from, ours_from):
            return "unknown"
        if theirs_from != ours_from:
            return "wrong"
    return ""


def _key(region: Region) -> Hashable:
    return _leaf_key(region.leaf), region.box


def _leaf_key(leaf: Leaf) -> Hashable:
    return leaf.entry if isinstance(leaf, FileTensor) else leaf  # each load has nodes of its own


def _corners(regions: list[Region]) -> Iterator[int]:
    """The numbers of the elements at the corners of all regions; between them, both maps are linear."""
    for region in regions:
        yield from _corners_of(region.box)


def _corners_of(box: Box) -> Iterator[int]:
    for steps in product(*({0, size - 1} for size in box.sizes)):
        yield box.to + sum(step * stride for step, stride in zip(steps, box.to_strides, strict=True))


def _origin(view: View, element: int) -> Hashable | None:
    """Where element number `element` of `view` comes from; None if that is no single element of each source."""
    (region,) = regions_of_range(view, element, element + 1)
    leaf = region.leaf
    if isinstance(leaf, Pointwise):
        inputs = [_origin(each, region.box.at if each.sizes else 0) for each in leaf.inputs()]
        constants = [value for value in leaf.args if not isinstance(value, View)]
        return None if None in inputs else (leaf.function, *map(repr, constants), *inputs)
    return None if isinstance(leaf, Computed) else (_leaf_key(leaf), region.box.at)
