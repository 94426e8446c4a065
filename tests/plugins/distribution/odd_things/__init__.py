"""A plug-in of somebody else: a format, a source, a command, a destination and what saves from it."""

from __future__ import annotations

from hf_zero_stream.plugin_api import FileFormat, PatchScope, Plugin, Row, Source


PLUGIN = Plugin(
    "odd",
    files=[FileFormat("raw bytes", (".raw",), "odd_things.raw")],
    sources={"vault": Source("shelf/name", "odd_things.vault")},
    commands={"weigh": "odd_things.weigh"},
    destinations={"columns": "odd_things.columns:make"},
    holders=["odd_things.columns:held"],
    rows={
        PatchScope.BLOCK: [
            Row(
                "transformers.utils.hub:cached_files",
                "odd_things.vault:cached_files",
                feature="loads from the vault",
                when=".sources.base:has_url_argument",
            )
        ]
    },
)
