"""The list of a save to a bucket that is not done: what it has put there, or what is to be done when all is there."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...checkpoint.format import parse_object
from ...errors import CheckpointError


LIST = ".hf_zero_stream-save.json"
"""The name of the object, below the URL of the save."""


@dataclass(frozen=True, kw_only=True)
class SaveList:
    """The contents of a list; all names are below the URL of the save.

    Attributes:
        is_complete: all shards are there, so that the save has happened.
        created: if it has not: the shards that it sends.
        replaced: those of them of which there is an earlier object.
        files: if it has happened: the small files, in the order in which they are to be written.
        removes: the objects that are to be removed then.
    """

    is_complete: bool = False
    created: Sequence[str] = ()
    replaced: Sequence[str] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    removes: Sequence[str] = ()

    def to_json(self) -> bytes:
        files = {name: b64encode(data).decode() for name, data in self.files.items()}
        lists = {"created": [*self.created], "replaced": [*self.replaced], "removes": [*self.removes]}
        return json.dumps({"is_complete": self.is_complete, "files": files, **lists}).encode()


def parse_list(data: bytes, where: str) -> SaveList:
    """Parse what :meth:`SaveList.to_json` gives; it may come from anywhere, and must not lead beyond its URL.

    Raises a CheckpointError if it is no such list.
    """
    found = parse_object(data, where)
    try:
        files = {name: b64decode(text, validate=True) for name, text in found.pop("files").items()}
        order = SaveList(files=files, **found)
        names = [*order.created, *order.replaced, *order.removes, *files]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: expected the list of a save: {error!r}. Remove this object.") from error
    if type(order.is_complete) is not bool or not all(map(_is_name, names)):
        raise CheckpointError(f"{where}: expected names of objects below it. Remove this object.")
    return order


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and all(part not in ("", ".", "..") for part in name.split("/"))
