"""The folder of one of our training states, as a map of bytes: where the values of a model's tensors lie.

All of them lie in it, masters where there are any; but for the base of adapters. ``state/`` writes these files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .format import excerpt, parse_object
from .formats import read_map
from .index import read_index_file, read_index_text
from .map import CheckpointMap
from .urls import on_this_host


RECORD = "training_state.json"

STATE = "state.safetensors"
"""The file of all tensors, if they are not in several, which are in an index then; their names are ``KEY/NAME``."""

_VALUES = "values/"


def index_of(single: str) -> str:
    """The file name of the index of what may be in this single file, if it is in several."""
    return f"{single}.index.json"


def files_of(place: Path, single: str = STATE) -> list[Path]:
    """The files of a state in the folder `place`, or of weights, if these may all be in the file `single`."""
    index = place / index_of(single)
    if index.is_file():
        weight_map = read_index_file(on_this_host(index))["weight_map"]
        return [place / shard for shard in sorted(set(weight_map.values()))]
    return [place / single]


def state_folder_of(path: Path) -> Path | None:
    """`path`, if it is the folder of a state."""
    return path if (path / RECORD).is_file() else None


def read_state(folder: Path) -> CheckpointMap:
    """Read the headers of the files of the state in `folder`, for its values.

    The names are those that the model in training has.

    Raises:
        ReadError: a file cannot be read.
        CheckpointError: a file is not sound.
    """
    folder = folder.absolute()
    index = folder / index_of(STATE)
    all_of_it = read_map(files_of(folder), read_index_file(index)["weight_map"] if index.exists() else None)
    record = parse_object(read_index_text(folder / RECORD), str(folder / RECORD))
    shared, live = (_names(folder, record, field) for field in ("shared", "live"))
    named = all_of_it.views.items()
    views = {name.removeprefix(_VALUES): view for name, view in named if name.startswith(_VALUES)}
    own = {name: its_own for its_own, name in live.items()}
    for alias, name in shared.items():
        if own.get(name, name) in views:
            views[own.get(alias, alias)] = views[own.get(name, name)]
    base = record.get("base")
    notes = (f"tensors of its base are not in it: {len(base)}",) if isinstance(base, dict) and base else ()
    return CheckpointMap(all_of_it.shards, views, notes, format="training state", is_of_training=True)


def _names(folder: Path, record: Mapping[str, Any], field: str) -> dict[str, str]:
    found = record.get(field, {})
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise CheckpointError(f"{folder / RECORD}: {field}: expected names; found {excerpt(found)}")
    return found
