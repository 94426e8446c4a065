"""All tensors of a checkpoint, whatever its format: each one's file and bytes, and what stands for it unread."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import CheckpointError
from ..sources.local import LocalFiles
from . import formats, safetensors
from .format import Format, Shard, ShardHeader, TensorEntry
from .lazy import LazyTensor, Materialise
from .nodes import FileTensor, HostTensor, View
from .untrusted_json import excerpt


@dataclass(frozen=True)
class CheckpointIndex:
    """All shards of a checkpoint and all tensors in them, by name."""

    shards: tuple[Shard, ...]
    tensors: Mapping[str, TensorEntry]
    absent: Mapping[str, str] = field(default_factory=dict)
    """Tensors that ``model.safetensors.index.json`` promises and no shard holds -> the promised file."""
    notes: tuple[str, ...] = ()
    """Where the shards are not as that file says, and what was taken instead."""

    @classmethod
    def from_files(
        cls, paths: Sequence[str | os.PathLike[str]], weight_map: Mapping[str, str] | None = None
    ) -> CheckpointIndex:
        """Read and check the headers of files of this host.

        Raises:
            ReadError: a file is missing or cannot be read.
            CheckpointError: a header is not valid, or two shards hold a tensor and `weight_map` names neither for it.
            NotAMap: a file of ``torch.save`` holds something else than tensors.
        """
        source = LocalFiles()
        headers = [formats.read_header(source, os.fspath(path)) for path in paths]
        return cls.from_headers(paths, headers, weight_map)

    @classmethod
    def from_headers(
        cls,
        paths: Sequence[str | os.PathLike[str]],
        headers: Sequence[ShardHeader],
        weight_map: Mapping[str, str] | None = None,
        *,
        format: Format = formats,
    ) -> CheckpointIndex:
        """Check `headers`, which some rank read, of the files that this rank sees at `paths`.

        `weight_map` is that of ``model.safetensors.index.json``: a tensor's name -> its shard's name.
        """
        weight_map = weight_map or {}
        shards: list[Shard] = []
        tensors: dict[str, TensorEntry] = {}
        repeated: dict[str, list[TensorEntry]] = {}
        for position, (path, header) in enumerate(zip(paths, headers, strict=True)):
            shard, entries = format.parse_header(os.fspath(path), position, header)
            shards.append(shard)
            for found in entries:
                other = tensors.setdefault(found.name, found)
                if other is not found:
                    repeated.setdefault(found.name, [other]).append(found)
        # Names in the checkpoint's folder, if the shards are those that `weight_map` names. Of paths and of names the
        # smallest belong together: the folder is what they differ by.
        smallest = min((shard.path for shard in shards), default="")
        folder = smallest.removesuffix(min(weight_map.values())) if weight_map else ""
        files = [shard.path.removeprefix(folder) for shard in shards]
        for name, copies in repeated.items():
            promised = [entry for entry in copies if files[entry.shard] == weight_map.get(name)]
            if not promised:
                first, second = (shards[entry.shard].path for entry in copies[:2])
                raise CheckpointError(
                    f"Tensor {excerpt(name)} is in two shards: {first} and {second}, and no index says which of them "
                    "counts. Keep it in one of them."
                )
            tensors[name] = promised[0]
        absent = {name: file for name, file in weight_map.items() if name not in tensors}
        misplaced = [
            name for name, file in weight_map.items() if name not in absent and files[tensors[name].shard] != file
        ]
        notes = []
        if repeated:
            notes.append(f"{_some(repeated)} in two shards or more; taken from the one that the index names.")
        if misplaced:
            notes.append(f"{_some(misplaced)} in another shard than the one that the index names; taken from there.")
        return cls(tuple(shards), tensors, absent, tuple(notes))

    def refuse_absent(self, wanted: Iterable[str]) -> None:
        """Raise a CheckpointError if a tensor in `wanted` is in no shard, although the index promises it."""
        names = sorted(set(wanted) & self.absent.keys())
        if names:
            more = f" ({len(names)} such tensors in all)" if len(names) > 1 else ""
            folder = os.path.dirname(self.shards[0].path) if self.shards else ""
            raise CheckpointError(
                f"{folder}: the checkpoint's index promises tensor {excerpt(names[0])} in "
                f"{excerpt(self.absent[names[0]])}, but no shard holds it{more}. Download or save the checkpoint "
                "again."
            )

    @property
    def note_of_absent(self) -> str:
        """What to log about :attr:`absent` where the model uses none of them."""
        return f"{_some(self.absent)} in no shard, although the index says so. The model has no use for that."


def _some(names: Iterable[str]) -> str:
    first, *others = names
    return f"{1 + len(others)} tensors, among them {excerpt(first)}, are" if others else f"Tensor {excerpt(first)} is"


class CheckpointSlice:
    """One tensor, like ``safetensors.safe_open(...).get_slice``; indexing it gives a :class:`LazyTensor`."""

    __slots__ = ("_materialise", "_view")

    def __init__(self, view: View, materialise: Materialise) -> None:
        self._view = view
        self._materialise = materialise

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor = LazyTensor.of(self._view, self._materialise)
        return tensor if index is Ellipsis else tensor[index]

    def get_shape(self) -> list[int]:
        return list(self._view.sizes)

    def get_dtype(self) -> str:
        return safetensors.dtype_name(self._view.node.dtype)


class AbsentSlice(CheckpointSlice):
    """A tensor that the checkpoint's index promises and no shard holds; `is_wanted` once somebody indexed it."""

    def __init__(self) -> None:
        nothing = HostTensor.of(torch.empty(0, dtype=torch.float32))
        super().__init__(View.whole(nothing), lambda view: torch.empty(0))
        self.is_wanted = False

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.is_wanted = True
        return super().__getitem__(...)  # empty: the load reports the missing tensor before the model is used


def checkpoint_slices(
    index: CheckpointIndex, materialise: Materialise, first_shard: int = 0
) -> dict[str, CheckpointSlice]:
    """A state dict of lazy slices of `index`, whose shards are numbered from `first_shard` on."""
    return {name: CheckpointSlice(view_of(entry, first_shard), materialise) for name, entry in index.tensors.items()}


def view_of(entry: TensorEntry, first_shard: int = 0) -> View:
    """The elements of `entry`, whose shards are numbered from `first_shard` on."""
    if first_shard:
        entry = entry._replace(shard=entry.shard + first_shard)
    if entry.strides is None:
        return View.whole(FileTensor(entry.shape, entry.dtype, entry))
    span = ((entry.stop - entry.start) // entry.dtype.itemsize,)
    return View(FileTensor(span, entry.dtype, entry._replace(shape=span, strides=None)), entry.shape, entry.strides)
