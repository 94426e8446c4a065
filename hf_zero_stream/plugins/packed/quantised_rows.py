"""Weights that are quantised while they are loaded, by all ranks together: each quantises a part of the values.

A quantised tensor may depend on all values (the mean that double quantisation subtracts), so that no rank can make its
own bytes from its own values. So each rank quantises some whole blocks, and all join what all have made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

import torch

from ...plugin_api import LazyTensor, Opaque, View
from .weights import PackedWeight


CHUNK_NUMEL = 2**21
"""About how many values are quantised at a time: quantising takes several times the memory of the values."""


class Quantisation(Protocol):
    """Quantises one weight in a format. All tensors of bytes are flat, uint8.

    Attributes:
        unit: number of values, in row-major order, that are quantised by themselves. A part has whole units, but that
            the last one may be cut short.
    """

    unit: int

    def nbytes(self, numel: int) -> tuple[int, ...]:
        """The sizes of what :meth:`quantise` returns of `numel` values."""
        ...

    def quantise(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Some tensors of bytes for a part of the values, flat; each is joined with that of the next part."""
        ...

    def join(self, fields: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The tensors of the checkpoint, of any shape and dtype, from the bytes of all parts, joined."""
        ...

    def record_quant_state(self, pieces: Mapping[str, torch.Tensor]) -> Mapping[str, int]:
        """Record the quant state in the bytes of each tensor; returns the sizes of those shorter than planned."""
        ...


@dataclass(eq=False, slots=True)
class Quantised(Opaque):
    """The row of bytes of a packed weight; its only argument gives the values, flat.

    As any :class:`Opaque`, it can be computed on one rank. Where ranks share the work, each calls :meth:`part`, and
    quantises those values by :meth:`quantise`; then :meth:`joined` with what all have made, and
    :meth:`record_quant_state` with the row.
    """

    joint_batches: ClassVar[str] = f"{__package__}.batches:quantising_batches"

    weight: PackedWeight | None = None
    quantisation: Quantisation | None = None

    @property
    def reason(self) -> str:
        """None: each value is read once, and in no more memory than a batch has."""
        return ""

    @property
    def source(self) -> View:
        view: View = self.args[0]
        return view

    def part(self, rank: int, world_size: int) -> tuple[int, int, int]:
        """(values of one rank's part, first own value, one past the last own)."""
        assert self.quantisation is not None
        units = -(-self.source.numel // self.quantisation.unit)
        numel = -(-units // world_size) * self.quantisation.unit
        return numel, min(self.source.numel, rank * numel), min(self.source.numel, (rank + 1) * numel)

    def part_nbytes(self, world_size: int) -> int:
        """The bytes that a rank makes of its part, at most."""
        assert self.quantisation is not None
        return sum(self.quantisation.nbytes(self.part(0, world_size)[0]))

    def quantise(self, values: torch.Tensor) -> torch.Tensor:
        """The bytes of a part."""
        assert self.quantisation is not None
        fields = [[torch.empty(0, dtype=torch.uint8, device=values.device)] for _ in self.quantisation.nbytes(0)]
        for chunk in values.split(max(1, CHUNK_NUMEL // self.quantisation.unit) * self.quantisation.unit):
            if chunk.numel():
                for field, made in zip(fields, self.quantisation.quantise(chunk), strict=True):
                    field.append(made)
        return torch.cat([piece for field in fields for piece in field])

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The row, from the bytes of all ranks' parts in order of rank, each of which may end in padding."""
        assert self.quantisation is not None and self.weight is not None
        fields: list[list[torch.Tensor]] = [[] for _ in self.quantisation.nbytes(0)]
        for rank, part in enumerate(parts):
            _, start, stop = self.part(rank, len(parts))
            sizes = self.quantisation.nbytes(stop - start)
            for field, piece in zip(fields, part[: sum(sizes)].split(sizes), strict=True):
                field.append(piece)
        row = torch.zeros(self.weight.row_bytes, dtype=torch.uint8, device=parts[0].device)
        tensors = self.quantisation.join([torch.cat(field) for field in fields])
        for each in self.weight.rows[0]:
            values = tensors[each.entry.name].contiguous().view(-1).view(torch.uint8)
            row[each.start : each.start + values.numel()] = values
        return row

    def record_quant_state(self, row: torch.Tensor) -> None:
        """Record the quant state that the values decide beside bytes; :attr:`weight` is complete from then on."""
        assert self.quantisation is not None and self.weight is not None
        pieces = {each.entry.name: row[each.start : each.stop] for each in self.weight.rows[0]}
        for name, nbytes in self.quantisation.record_quant_state(pieces).items():
            self.weight.shorten(name, nbytes)


def quantised(values: LazyTensor, weight: PackedWeight, quantisation: Quantisation) -> LazyTensor:
    """The lazy row of bytes of `weight` (uint8), which is to be made of `values`."""
    flat = values.reshape(-1)
    assert isinstance(flat, LazyTensor)
    node = Quantised(
        (weight.row_bytes,), torch.uint8, torch.empty, (flat.view_of_node,), {}, None, weight, quantisation
    )
    node.function = partial(_on_one_rank, node)
    return LazyTensor.whole(node, values.reader)


def _on_one_rank(node: Quantised, values: torch.Tensor) -> torch.Tensor:
    row = node.joined([node.quantise(values.view(-1))])
    node.record_quant_state(row)
    return row
