"""Rows of the lists of formats: plain data, for the core's own and those of plug-ins."""

from __future__ import annotations

from typing import NamedTuple


TORCH_ENDINGS, DISTRIBUTED_ENDING = (".bin", ".pt", ".pth"), ".distcp"
"""Ends of the names of files with tensors that ``torch.save`` and torch.distributed.checkpoint wrote."""

METADATA = ".metadata"
"""The file of torch.distributed.checkpoint that describes the others."""


class FileFormat(NamedTuple):
    """A format of files.

    Attributes:
        name: for messages and :attr:`..checkpoint.map.CheckpointMap.format`.
        endings: the ends of its files' paths.
        module: a :class:`..checkpoint.formats.Format`.
        holds_values: these files hold the tensors themselves; otherwise they say which other files do.
        is_always_map: its reader raises no :class:`..checkpoint.format.NotAMap`. Otherwise the module has a function
            ``not_a_map_reason(source, paths)`` too: why the files are no maps of bytes; ``""`` if they are.
    """

    name: str
    endings: tuple[str, ...]
    module: str
    holds_values: bool = True
    is_always_map: bool = True


class FolderFormat(NamedTuple):
    """A format of whole folders, which can be inspected and converted.

    Attributes:
        name: as of a :class:`FileFormat`.
        find: ``module:name`` of a function of a path: the path that `read` takes, or None if the folder is of another
            format. It goes by the names of files.
        read: ``module:name`` of a function of that path, which gives a :class:`..checkpoint.map.CheckpointMap`.
        refusal: why ``from_pretrained`` cannot load it, and what to do; empty if it can.
    """

    name: str
    find: str
    read: str
    refusal: str = ""
