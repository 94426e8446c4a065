"""A weight as a parameter of bytes: the bytes of the checkpoint's tensors, side by side, one row for each matrix."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...plugin_api import FileTensor, HostTensor, LazyTensor, TensorEntry, View
from .programs import Neighbours, NotPackable, NotQuantised, Program, taken_apart


class SourceRange(NamedTuple):
    """The place in a row of bytes of one tensor of the checkpoint.

    Attributes:
        first: number of the tensor's byte that comes first.
        start, stop: byte in the row where they begin, and one past the last.
    """

    entry: TensorEntry
    first: int
    start: int
    stop: int


@dataclass(eq=False, repr=False)
class PackedWeight:
    """A frozen parameter of bytes (uint8): the program that makes matrices of it, and the tensors that it holds.

    The parameter is flat: the rows lie one after the other. So FSDP2, which cuts along the first dimension, gives each
    rank as many bytes as ZeRO-3 does, also where there are fewer experts than ranks.

    Attributes:
        program: gives one matrix from the inputs of its row.
        inputs: first byte in the row, dtype and number of elements of each input.
        dtype: of the values.
        row_bytes: length of a row; of all rows the inputs lie in the same places.
        rows: for each row, what of the checkpoint it holds.
        is_stack: whether there is a dimension of experts.
        computes_in: the dtype of the matrices, if it is another one: that in which FSDP2 would gather the values.
    """

    program: Program
    inputs: tuple[tuple[int, torch.dtype, int], ...]
    dtype: torch.dtype
    row_bytes: int
    rows: tuple[tuple[SourceRange, ...], ...]
    is_stack: bool
    computes_in: torch.dtype | None = None

    def matrix(self, parameter: torch.Tensor, number: int = 0) -> torch.Tensor:
        """The dequantised matrix `number`, new memory, from the whole `parameter`, gathered if it is partitioned."""
        row = parameter.detach().view(-1)[number * self.row_bytes : (number + 1) * self.row_bytes]
        inputs = [_as_dtype(row, *place) for place in self.inputs]
        values = self.program.run(inputs, self.dtype, self.matrix_dtype)
        return values.view(values.shape[1:] if self.is_stack else values.shape)

    @property
    def matrix_dtype(self) -> torch.dtype:
        return self.computes_in or self.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dequantised weight."""
        sizes = self.program.result.sizes
        return (len(self.rows), *sizes[1:]) if self.is_stack else sizes

    @property
    def padding_bytes(self) -> int:
        """Bytes of the parameter that are of no tensor of the checkpoint."""
        return sum(self.row_bytes - sum(each.stop - each.start for each in row) for row in self.rows)

    def shorten(self, name: str, nbytes: int) -> None:
        """Note that the tensor `name` of the checkpoint, flat and of bytes, has only `nbytes` bytes."""

        def shortened(each: SourceRange) -> SourceRange:
            if each.entry.name != name:
                return each
            entry = each.entry._replace(shape=(nbytes,), stop=each.entry.start + nbytes)
            return each._replace(entry=entry, stop=each.start + nbytes)

        self.rows = tuple(tuple(map(shortened, row)) for row in self.rows)

    def __deepcopy__(self, memo: Any) -> PackedWeight:
        return self


def _as_dtype(row: torch.Tensor, start: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """Bytes as elements of `dtype`; copied if they are not aligned where they were gathered to."""
    values = row[start : start + numel * dtype.itemsize]
    if values.storage_offset() % dtype.itemsize:
        values = values.clone()
    return values.view(dtype)


class SourceBytes:
    """The bytes of the checkpoint's tensors that weights hold: when written back, each must be there exactly once.

    `unused` has the tensors that no weight comes from, by their common prefix with the others of their module, for
    instance ``weight_shape`` beside ``weight_packed``, or ``weight.quant_state.x`` beside ``weight``: they are kept,
    and written back too.
    """

    def __init__(self, entries: Iterable[TensorEntry], used: Set[str]) -> None:
        self.unused: dict[str, list[TensorEntry]] = {}
        for entry in entries:
            if entry.name not in used:
                name = entry.name
                while (above := _prefix(name)) and above not in used:
                    name = above
                self.unused.setdefault(_prefix(above or entry.name), []).append(entry)
        self._nodes: dict[str, FileTensor] = {}

    def view(self, bytes_of: SourceRange) -> View:
        """The bytes, as uint8, of the file."""
        entry, count = bytes_of.entry, bytes_of.stop - bytes_of.start
        node = self._nodes.get(entry.name)
        if node is None:
            nbytes = entry.stop - entry.start
            as_bytes = entry._replace(dtype=torch.uint8, shape=(nbytes,))
            node = self._nodes[entry.name] = FileTensor((nbytes,), torch.uint8, as_bytes)
        return View(node, (1, count), (count, 1), bytes_of.first)


def _prefix(name: str) -> str:
    return name.rpartition(".")[0]


def pack(
    weight: LazyTensor, dtype: torch.dtype, is_stack: bool, source_bytes: SourceBytes, *, always: bool = False
) -> tuple[PackedWeight, LazyTensor]:
    """A dequantised lazy weight, that is to have `dtype`, as a lazy tensor of packed bytes.

    `is_stack`: the first dimension is that of experts, each of which is dequantised by itself. `always`: also where
    the bytes are not fewer.

    Raises:
        NotQuantised: it is no more than a copy of tensors in the file.
        NotPackable: its bytes are not fewer, or do not lie as its matrices would need them.
    """
    whole = weight.view_of_node
    matrices = [whole.narrow(0, number, 1) for number in range(whole.sizes[0])] if is_stack else [whole]
    program, of_matrices = _common_program(matrices)
    if program.does_nothing:
        raise NotQuantised("its values are in the file")
    inputs, row_bytes = _laid_out(of_matrices[0])
    rows, constants = [], []
    for regions in of_matrices:
        places = [(region, start) for region, (start, _, _) in zip(regions, inputs, strict=True)]
        rows.append([_bytes(region, start) for region, start in places if isinstance(region.source, FileTensor)])
        constants.append([(start, region.source) for region, start in places if isinstance(region.source, HostTensor)])
    rows, row_bytes = _with_unused(rows, row_bytes, source_bytes)
    if row_bytes >= program.result.numel * dtype.itemsize and not always:
        raise NotPackable("its bytes are not fewer than those of its values")
    packed = PackedWeight(program, tuple(inputs), dtype, row_bytes, tuple(map(tuple, rows)), is_stack)
    row_views = [_row_view(row, more, row_bytes, source_bytes) for row, more in zip(rows, constants, strict=True)]
    view = View.joined(tuple(row_views), 0)
    return packed, LazyTensor.of(View(view.node, (row_bytes * len(rows),), (1,), view.offset), weight.reader)


def _common_program(matrices: Sequence[View]) -> tuple[Program, list[list[Neighbours]]]:
    """The one program of all `matrices`, and the regions of each; constants are inputs only if they differ."""
    for takes_constants in (False, True):
        program, regions = taken_apart(matrices[0], takes_constants=takes_constants)
        found = [regions]
        for matrix in matrices[1:]:
            other, regions = taken_apart(matrix, takes_constants=takes_constants)
            if other.signature != program.signature:
                break
            found.append(regions)
        else:
            return program, found
    raise NotPackable("its matrices are not quantised alike")


def _laid_out(regions: Sequence[Neighbours]) -> tuple[list[tuple[int, torch.dtype, int]], int]:
    """Return the place of each input in a row, aligned to its dtype, and the length of a row."""
    inputs, stop = [], 0
    for region in regions:
        itemsize = region.source.dtype.itemsize
        start = -(-stop // itemsize) * itemsize
        inputs.append((start, region.source.dtype, region.numel))
        stop = start + region.numel * itemsize
    largest = max(region.source.dtype.itemsize for region in regions)
    return inputs, -(-stop // largest) * largest  # after which the next row's inputs are aligned too


def _bytes(region: Neighbours, start: int) -> SourceRange:
    assert isinstance(region.source, FileTensor)
    itemsize = region.source.dtype.itemsize
    return SourceRange(region.source.entry, region.first * itemsize, start, start + region.numel * itemsize)


def _with_unused(
    rows: list[list[SourceRange]], row_bytes: int, source_bytes: SourceBytes
) -> tuple[list[list[SourceRange]], int]:
    """Append unused sibling tensors (for example quant_state) to each row; all rows must get as many.

    Texts may differ in length: each has the room of the longest.
    """
    prefixes = [{_prefix(each.entry.name) for each in row} for row in rows]
    found = [[entry for prefix in sorted(each) for entry in source_bytes.unused.get(prefix, ())] for each in prefixes]
    if not any(found):
        return rows, row_bytes
    if len(rows) > 1 and len(set.union(*prefixes)) < len(rows):
        raise NotPackable(f"{found[0][0].name} belongs to several of its matrices")
    if len(set(map(len, found))) > 1:
        raise NotPackable(f"not all of its matrices have a tensor like {max(found, key=len)[0].name}")
    starts = [row_bytes]
    for entries in zip(*found, strict=True):
        starts.append(starts[-1] + max(entry.stop - entry.start for entry in entries))
    extended = []
    for row, entries in zip(rows, found, strict=True):
        more = [
            SourceRange(entry, 0, start, start + entry.stop - entry.start)
            for entry, start in zip(entries, starts, strict=False)
        ]
        extended.append([*row, *more])
    for prefix in set.union(*prefixes):
        source_bytes.unused.pop(prefix, None)
    return extended, -(-starts[-1] // 8) * 8


def _row_view(
    row: Sequence[SourceRange], constants: Sequence[tuple[int, HostTensor]], row_bytes: int, source_bytes: SourceBytes
) -> View:
    """Join the bytes of a row, with zeros where none are; each constant begins at a byte of the row."""
    spans = [(each.start, source_bytes.view(each)) for each in row]
    spans += [
        (start, View.whole(HostTensor.of(node.tensor.view(torch.uint8).view(1, -1)))) for start, node in constants
    ]
    pieces, stop = [], 0
    for start, view in sorted(spans, key=lambda span: span[0]):
        if start > stop:
            pieces.append(_zeros(start - stop))
        pieces.append(view)
        stop = start + view.numel
    if row_bytes > stop:
        pieces.append(_zeros(row_bytes - stop))
    return View.joined(tuple(pieces), 1)


@functools.cache
def _zeros(count: int) -> View:
    return View.whole(HostTensor.of(torch.zeros(1, count, dtype=torch.uint8)))


def not_whole(weights: Iterable[PackedWeight]) -> set[str]:
    """The tensors of the checkpoint of which `weights` hold some bytes not at all, or more than once."""
    spans: dict[str, list[tuple[int, int]]] = {}
    sizes: dict[str, int] = {}
    for each in (each for weight in weights for row in weight.rows for each in row):
        spans.setdefault(each.entry.name, []).append((each.first, each.first + each.stop - each.start))
        sizes[each.entry.name] = each.entry.stop - each.entry.start
    found = set()
    for name, of_tensor in spans.items():
        ends = [0, *(stop for _, stop in sorted(of_tensor))]
        starts = [*(start for start, _ in sorted(of_tensor)), sizes[name]]
        if starts != ends:
            found.add(name)
    return found


def sources(packed: Mapping[str, tuple[PackedWeight, View]]) -> dict[str, tuple[TensorEntry, View]]:
    """The tensors of the checkpoint that packed weights hold, by name, and the bytes of each, flat.

    `packed` has for each parameter its bytes, as a flat view.
    """
    found: dict[str, tuple[TensorEntry, list[tuple[int, View]]]] = {}
    for weight, view in packed.values():
        for number, row in enumerate(weight.rows):
            for each in row:
                offset, count = view.offset + number * weight.row_bytes + each.start, each.stop - each.start
                piece = View(view.node, (count,), (1,), offset)
                found.setdefault(each.entry.name, (each.entry, []))[1].append((each.first, piece))
    whole = {}
    for name, (entry, pieces) in found.items():
        pieces.sort(key=lambda piece: piece[0])
        whole[name] = entry, View.joined(tuple(piece for _, piece in pieces), 0)
    return whole
