"""What is called with every checkpoint of the plug-in ``pickled`` that the fuzzer makes; as in :mod:`.targets`."""

from __future__ import annotations

import atexit
import functools
import io
import math
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from hf_zero_stream.checkpoint.format import NotAMap
from hf_zero_stream.checkpoint.nodes import FileTensor, View
from hf_zero_stream.errors import CheckpointError, UnsupportedError
from hf_zero_stream.plugins.pickled import torch_files, zero_folder
from hf_zero_stream.plugins.pickled.zero_folder import ZeroFolder
from hf_zero_stream.plugins.pickled.zero_model_files import read_model_file
from hf_zero_stream.plugins.pickled.zero_optimizer_files import read_optimizer_file
from hf_zero_stream.sources.local import LocalFiles

from .distributed import read_distributed
from .seeds import zero_files
from .targets import Disagreement, in_memory


# ------------------------------------------------------------------------------------------------ files of torch.save


def read_torch_file(content: bytes) -> str:
    """Read a file of ``torch.save`` as a map of bytes, and if that can be done, with torch; "same", or why not.

    Raises:
        Disagreement: torch, which reads weights only, refuses what we accept, or reads it otherwise.
    """
    with in_memory(content) as path:
        try:
            views = torch_files.parse_header(path, 0, torch_files.read_header(LocalFiles(), path)).views
        except CheckpointError:
            return "refused"
        except NotAMap:
            return "no map"
        try:
            theirs = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as error:
            raise Disagreement(f"we read what torch refuses: {error}") from error
        for name, view in views.items():
            expected = theirs[name].detach()
            if (view.node.dtype, view.sizes) != (expected.dtype, tuple(expected.shape)):
                raise Disagreement(f"we read {view}, torch {expected.dtype} of shape {tuple(expected.shape)}")
            if _values(content, view) != expected.contiguous().view(-1).view(torch.uint8).numpy().tobytes():
                raise Disagreement(f"{name} has other bytes")
        if views.keys() != set(theirs):
            raise Disagreement("torch finds other tensors")
        return "same"


def _values(content: bytes, view: View) -> bytes:
    """The bytes of the elements of `view`, which is one of a tensor in a file, row by row."""
    assert isinstance(view.node, FileTensor)
    found = content[view.node.entry.start : view.node.entry.stop]
    if view.is_row_major:
        return found
    flat = torch.frombuffer(bytearray(found), dtype=view.node.dtype)
    return flat.as_strided(view.sizes, view.strides).contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def around_pickle(description: bytes) -> bytes:
    """An archive with this description, and two storages of 48 and 8 bytes."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_STORED) as archive:
        members = {"data.pkl": description, "byteorder": b"little", "data/0": bytes(range(48)), "data/1": bytes(8)}
        for name, member in {**members, "version": b"3\n"}.items():
            archive.writestr(f"archive/{name}", member)
    return data.getvalue()


# ------------------------------------------------------------------------------------------------------ ZeRO folders


@functools.cache
def _zero_folders() -> list[tuple[Path, str, bytes]]:
    """(folder of a sound checkpoint, name of a file in it, its content) for each file of each."""
    place = Path(tempfile.mkdtemp(prefix="zero-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    found = []
    for stage, files in zero_files().items():
        folder = place / stage.replace(" ", "-")
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
            found.append((folder, name, content))
    return found


def read_zero(content: bytes) -> str:
    """Read a ZeRO checkpoint of which one file has another description; "read", or why not.

    Raises:
        Disagreement: a tensor has bytes that are not in its file, or more or fewer elements than its shape.
    """
    folders = _zero_folders()
    folder, name, sound = folders[content[0] % len(folders) if content else 0]
    changed = folder / name
    changed.write_bytes(_with_description(sound, content[1:]))

    def reading(read: Callable[[LocalFiles, str], Any]) -> Callable[[LocalFiles, str], Any]:
        return lambda source, path: read(source, path) if path == str(changed) else _read_once(read, path)

    readers = {"read_optimizer_file": reading(read_optimizer_file), "read_model_file": reading(read_model_file)}
    try:
        with mock.patch.multiple(zero_folder, **readers):
            zero = zero_folder.read_zero_folder(LocalFiles(), folder)
        views = [view for key in ("fp32", *zero.keys) for view in zero.views(key).values()]
        for view in [*views, *zero.frozen().values(), *zero.buffers().values()]:
            _check_pieces(zero, view)
        return "read"
    except CheckpointError:
        return "refused"
    except UnsupportedError:
        return "unsupported"
    finally:
        changed.write_bytes(sound)


@functools.cache
def _read_once(read: Callable[[LocalFiles, str], Any], path: str) -> Any:
    """What is in a sound file."""
    return read(LocalFiles(), path)


def _check_pieces(zero: ZeroFolder, view: View) -> None:
    nodes = [piece.node for piece in view.node.inputs()] or [view.node]
    entries = [node.entry for node in nodes if isinstance(node, FileTensor)]
    count = sum(math.prod(entry.shape) for entry in entries)
    if len(entries) != len(nodes) or count != view.numel or len({entry.dtype for entry in entries}) != 1:
        raise Disagreement(f"{count} elements for a shape of {view.sizes}")
    for entry in entries:
        size = zero.shards[entry.shard].size_bytes
        is_inside = 0 <= entry.start <= entry.stop <= size or not entry.shape[0]
        if not is_inside or entry.stop - entry.start != entry.shape[0] * entry.dtype.itemsize:
            raise Disagreement(f"{entry} in a file of {size} bytes")


def _with_description(content: bytes, description: bytes) -> bytes:
    data = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(content)) as sound,
        zipfile.ZipFile(data, "w", zipfile.ZIP_STORED) as archive,
    ):
        for name in sound.namelist():
            archive.writestr(name, description if name.endswith("/data.pkl") else sound.read(name))
    return data.getvalue()


OF_PICKLED: dict[str, Callable[[bytes], str]] = {
    "torch": read_torch_file,
    "pickle": lambda description: read_torch_file(around_pickle(description)),
    "zero": read_zero,
    "distcp": read_distributed,
}
"""As :data:`.targets.TARGETS`."""
