"""The list of the last save to a bucket: whose the place is, and what is to be done when all is there."""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from ...errors import CheckpointError
from ...plugin_api import parse_object


LIST = ".hf_zero_stream-save.json"
"""The name of the object, below the URL of the save. It stays: to remove it would be no request that compares."""


Stage = Literal["begun", "happened", "done"]

_BEGUN = re.compile(rb'\{"id": "(\w+)", "stage": "begun", "created": \[((?:"[\w./-]+"(?:, (?="[\w./-]+"))?)*)')
"""The first part of a list that has begun, with whole names."""


class Version(NamedTuple):
    """One content of an object, as its store tells it from others: by an HTTP ETag, or a generation."""

    e_tag: str | None
    generation: str | None

    def is_of(self, data: bytes) -> bool:
        """Whether it is seen to be that of `data`: the ETag of many stores is the MD5 of a small object."""
        return self.e_tag == f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


@dataclass(frozen=True, kw_only=True)
class SaveList:
    """The contents of a list; all names are below the URL of the save.

    Attributes:
        id: of the save, which owns the place until another one writes its list. No other has it.
        stage: it has begun; or all shards are there, so that it has happened; or all is done.
        created: if it has begun: the shards that it sends, and those of a save from which it has taken the place.
        files: if it has happened: the small files, in the order in which they are to be written.
        over: the version that each of them is to replace; None if there was no such object.
        copies: shards that are to get another name then, and that name.
        removes: the objects that are to be removed at the end.
    """

    id: str
    stage: Stage = "begun"
    created: Sequence[str] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    over: Mapping[str, Version | None] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    removes: Sequence[str] = ()

    def to_json(self) -> bytes:
        files = {name: b64encode(data).decode() for name, data in self.files.items()}
        lists = {"created": [*self.created], "removes": [*self.removes]}
        maps = {"files": files, "over": dict(self.over), "copies": dict(self.copies)}
        return json.dumps({"id": self.id, "stage": self.stage, **lists, **maps}).encode()


def parse_list(data: bytes, where: str) -> SaveList:
    """Parse what :meth:`SaveList.to_json` gives; it may come from anywhere, and must not lead beyond its URL.

    Of one that has begun, and that a proxy has cut, the names that are left count: nothing was published by it. Raises
    a CheckpointError if it is no such list.
    """
    try:
        found = parse_object(data, where)
        files = {name: b64decode(text, validate=True) for name, text in found.pop("files").items()}
        over = {name: None if it is None else Version(*it) for name, it in found.pop("over").items()}
        order = SaveList(files=files, over=over, **found)
        names = [*order.created, *order.removes, *files, *order.copies, *order.copies.values()]
        is_sound = order.stage in get_args(Stage) and isinstance(order.id, str) and over.keys() == files.keys()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if cut := _BEGUN.match(data):
            names = json.loads(f"[{cut[2].decode()}]")
            return SaveList(id=cut[1].decode(), created=[name for name in names if _is_name(name)])
        raise CheckpointError(
            f"{where}: expected the list of a save, found {data[:40]!r}: {error}. If this is a page of a proxy, look "
            "for that; else remove the object."
        ) from error
    if not is_sound or not all(map(_is_name, names)):
        raise CheckpointError(f"{where}: expected names of objects below it. Remove this object.")
    return order


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and all(part not in ("", ".", "..") for part in name.split("/"))
