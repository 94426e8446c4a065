"""The folder of one of our training states, as a map of bytes: where the fp32 values of a model's tensors lie.

Trained parameters lie in it; buffers and frozen parameters in the weights beside it, whose names are in :data:`NAMES`.
If conversions compute some of the weights, their exact values are in a file of the state.
``state/`` writes these files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, UnsupportedError
from .format import excerpt, parse_object
from .formats import read_index_file, read_index_text, read_map
from .map import CheckpointMap


RECORD, NAMES = "training_state.json", "names.json"


def state_folder_of(path: Path) -> Path | None:
    """`path`, if it is the folder of a state."""
    return path if (path / RECORD).is_file() else None


def read_state(folder: Path) -> CheckpointMap:
    """Read the headers of the files of the state in `folder`, and of those of the weights beside it.

    The names are those that the model in training has.

    Raises:
        ReadError: a file cannot be read.
        CheckpointError: a file is not sound.
        UnsupportedError: weights have other names, or another layout, than in the model.
    """
    folder = folder.absolute()
    masters = _map(folder, "model.fp32")
    exact = _map(folder, "model.exact", len(masters.shards))
    names = _object(folder / NAMES) if (folder / NAMES).exists() else {}
    places = dict(_places(folder, names))
    trained = [name for name in _trained(folder) if name not in masters.views]
    if masters.views and trained:
        raise UnsupportedError(
            f"{folder}: it lacks the fp32 values of {len(trained)} parameters, among them {excerpt(trained[0])}. "
            "Load the state into the training, and save it again."
        )
    untrained = [*names.get("buffers", {}), *names.get("frozen", {})]
    of_weights = [name for name in [*untrained, *trained] if name not in exact.views]
    wanted = {name: places.get(name, name) for name in of_weights}
    inside = (*masters.shards, *exact.shards)
    weights = _map(folder.parent, "model", len(inside)) if wanted else CheckpointMap((), {})
    lacking = [name for name, stored in wanted.items() if stored not in weights.views]
    if lacking:
        raise UnsupportedError(
            f"{folder}: of {len(lacking)} tensors, among them {excerpt(lacking[0])}, the weights beside the state "
            "have no such tensor, or have it in another layout. Load the state into the training, and save the model."
        )
    views = {name: weights.views[str(stored)] for name, stored in wanted.items()} | {**exact.views, **masters.views}
    own = {live: name for name, live in names.get("live", {}).items()}
    for alias, name in names.get("shared", {}).items():
        if own.get(name, name) in views:
            views[own.get(alias, alias)] = views[own.get(name, name)]
    notes = (f"frozen parameters are not in it: {left_out}",) if (left_out := names.get("left_out")) else ()
    return CheckpointMap((*inside, *weights.shards), views, notes, format="training state", is_of_training=True)


def _places(folder: Path, names: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Yield each name and its name in the files of weights; None if conversions have made other tensors of it."""
    for kind in ("buffers", "frozen", "trained"):
        of_kind = names.get(kind, {})
        if not isinstance(of_kind, dict):
            raise CheckpointError(f"{folder / NAMES}: {kind}: expected an object; found {excerpt(of_kind)}")
        for name, place in of_kind.items():
            if not (isinstance(place, list) and place and isinstance(place[0], (str, type(None)))):
                raise CheckpointError(f"{folder / NAMES}: {name}: expected a name and a shape; found {excerpt(place)}")
            yield name, place[0]
    for kind in ("shared", "live"):
        of_kind = names.get(kind, {})
        if not isinstance(of_kind, dict) or not all(isinstance(name, str) for name in of_kind.values()):
            raise CheckpointError(f"{folder / NAMES}: {kind}: expected names; found {excerpt(of_kind)}")


def _trained(folder: Path) -> list[str]:
    """The names of the parameters that the optimizer trains."""
    try:
        return [str(name) for group in _object(folder / RECORD)["groups"] for name in group["parameters"]]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / RECORD}: expected the groups of an optimizer: {error!r}") from error


def _object(path: Path) -> dict[str, Any]:
    return parse_object(read_index_text(path), str(path))


def _map(folder: Path, stem: str, first_shard: int = 0) -> CheckpointMap:
    """The map of the file ``STEM.safetensors``, or of its shards; an empty one if there are neither."""
    base, _, variant = stem.partition(".")
    index = folder / f"{base}.safetensors.index.{variant}{'.' if variant else ''}json"
    if index.exists():
        weight_map = read_index_file(index)["weight_map"]
        return read_map([folder / name for name in sorted(set(weight_map.values()))], weight_map, first_shard)
    file = folder / f"{stem}.safetensors"
    return read_map([file] if file.exists() else [], None, first_shard)
