"""The map that every reader of a format returns: all tensors of a checkpoint, and their bytes in its files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from .format import Shard, TensorEntry, excerpt
from .nodes import FileTensor, View


if TYPE_CHECKING:
    from .lazy import CheckpointSlice, Materialise


@dataclass(frozen=True)
class CheckpointMap:
    """The tensors of a checkpoint, none of them read.

    Attributes:
        shards: the files; an entry's ``shard`` counts in them, or in those of a load that had others before.
        views: name -> its elements, in the tensor's own shape and dtype.
        notes: oddities that are no faults.
        absent: tensors that the index promises and no shard holds -> the promised file.
        format: the :attr:`..registry.FileFormat.name` of the format.
        has_names_of_model: names and layouts are those of a model in training, and not those that ``save_pretrained``
            writes.
        is_of_training: the tensors are the fp32 values that an optimizer trains, under the names of its model.
    """

    shards: tuple[Shard, ...]
    views: Mapping[str, View]
    notes: tuple[str, ...] = ()
    absent: Mapping[str, str] = field(default_factory=dict)
    format: str = "safetensors"
    has_names_of_model: bool = False
    is_of_training: bool = False

    @classmethod
    def of_entries(cls, shard: Shard, entries: Iterable[TensorEntry], **more: Any) -> CheckpointMap:
        """The tensors in one file."""
        return cls((shard,), {entry.name: view_of(entry) for entry in entries}, **more)

    @classmethod
    def joined(
        cls, paths: Sequence[str], parts: Sequence[CheckpointMap], weight_map: Mapping[str, str]
    ) -> CheckpointMap:
        """The map of a checkpoint whose files at `paths` have these `parts`.

        `weight_map` is that of ``model.safetensors.index.json``: a tensor's name -> its shard's name.

        Raises:
            CheckpointError: two shards hold a tensor, and `weight_map` names neither for it.
        """
        homes: dict[str, list[int]] = {}
        for number, part in enumerate(parts):
            for name in part.views:
                homes.setdefault(name, []).append(number)
        # Names in the checkpoint's folder, if the shards are those that `weight_map` names. Of paths and of names the
        # smallest belong together: the folder is what they differ by.
        folder = min(paths, default="").removesuffix(min(weight_map.values())) if weight_map else ""
        files = [path.removeprefix(folder) for path in paths]
        repeated = [name for name, numbers in homes.items() if len(numbers) > 1]
        for name in repeated:
            promised = [number for number in homes[name] if files[number] == weight_map.get(name)]
            if not promised:
                first, second = (paths[number] for number in homes[name][:2])
                raise CheckpointError(
                    f"Tensor {excerpt(name)} is in two shards: {first} and {second}, and no index says which of them "
                    "counts. Keep it in one of them."
                )
            homes[name] = promised
        absent = {name: file for name, file in weight_map.items() if name not in homes}
        misplaced = [name for name, file in weight_map.items() if name in homes and files[homes[name][0]] != file]
        notes = [note for part in parts for note in part.notes]
        if repeated:
            notes.append(f"{_counted_names(repeated)} in two shards or more; taken from the one that the index names.")
        if misplaced:
            notes.append(
                f"{_counted_names(misplaced)} in another shard than the one that the index names; taken from there."
            )
        return cls(
            tuple(shard for part in parts for shard in part.shards),
            {name: parts[number].views[name] for name, (number, *_) in homes.items()},
            tuple(notes),
            absent,
            parts[0].format if parts else "safetensors",
            bool(parts) and parts[0].has_names_of_model,
        )

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """The tensors that lie in one run of bytes each."""
        return {name: view.node.entry for name, view in self.views.items() if isinstance(view.node, FileTensor)}

    @property
    def metadata(self) -> Mapping[str, str]:
        """The metadata for headers of safetensors files with these tensors."""
        return self.shards[0].metadata if self.format == "safetensors" and self.shards else {"format": "pt"}

    def slices(self, materialise: Materialise) -> dict[str, CheckpointSlice]:
        """A state dict of lazy slices."""
        from .lazy import CheckpointSlice  # imports torch, which a look at headers can do without

        return {name: CheckpointSlice(view, materialise) for name, view in self.views.items()}

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
        """The line to log about :attr:`absent` if the model uses none of them."""
        return f"{_counted_names(self.absent)} in no shard, although the index says so. The model has no use for that."


def _counted_names(names: Iterable[str]) -> str:
    first, *others = names
    return f"{1 + len(others)} tensors, among them {excerpt(first)}, are" if others else f"Tensor {excerpt(first)} is"


def view_of(entry: TensorEntry) -> View:
    """The elements of `entry`."""
    return View.whole(FileTensor(entry.shape, entry.dtype, entry))
