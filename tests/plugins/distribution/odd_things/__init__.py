"""A plug-in of somebody else: a format, a source, a command, a destination and what saves from it."""

from __future__ import annotations

from hf_zero_stream.registry.formats import FileFormat
from hf_zero_stream.registry.plugins import Plugin, Source


PLUGIN = Plugin(
    "odd",
    files=[FileFormat("raw bytes", (".raw",), "odd_things.raw")],
    sources={"vault": Source("name", "odd_things.vault")},
    commands={"weigh": "odd_things.weigh"},
    destinations={"columns": "odd_things.columns:make"},
    holders=["odd_things.columns:held"],
)
