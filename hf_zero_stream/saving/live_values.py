"""Values where training keeps them, which a thread writes later: they must be those of the call until then."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Set
from typing import NamedTuple

import numpy
import torch

from ..accelerators import settle
from ..errors import SaveError
from ..holdings.holding import Holding


_SAMPLES, _SAMPLE_BYTES = 16, 16


_SampleKind = tuple[torch.device, torch.dtype, int]
"""The device, the dtype and the dimensions of a sample: those of one kind are taken, and kept, together."""


class _Live(NamedTuple):
    """Flat values in memory that lasts, from element `first` of a source on; and how to see that they are the same.

    `watched` is a view of some of them, of which there is a copy in the samples of this kind, from row `row` on.
    """

    values: torch.Tensor
    first: int
    version: int | None
    watched: torch.Tensor
    kind: _SampleKind
    row: int


class LiveValues:
    """The values that sources have at the call, wherever training keeps them; see :data:`.parameters.Values`.

    Sources whose memory does not last are left out: of these, somebody makes a copy at the call.
    """

    def __init__(self, holdings: Mapping[str, Holding], storages: Set[int]) -> None:
        self._live: dict[str, _Live] = {}
        watched: defaultdict[_SampleKind, list[torch.Tensor]] = defaultdict(list)
        rows = Counter[_SampleKind]()
        for source, holding in holdings.items():
            if holding.is_zero:
                values = _zeros(holding)
            elif holding.is_swapped:
                continue
            else:
                with holding.open() as opened:
                    values = opened.detach()
                if values.numel() and values.untyped_storage().data_ptr() not in storages:
                    continue
            version = None if values.is_inference() else values._version
            view = _spread(values)
            kind = view.device, view.dtype, view.dim()
            self._live[source] = _Live(values, holding.first, version, view, kind, rows[kind])
            watched[kind].append(view)
            rows[kind] += len(view)
        self._samples = {kind: torch.cat(views) for kind, views in watched.items()}
        settle(self._samples.values())  # threads compare on other streams

    def __contains__(self, source: object) -> bool:
        return source in self._live

    def __call__(self, source: str, start: int) -> torch.Tensor:
        live = self._live[source]
        return live.values[start - live.first :]

    def device_of(self, source: str) -> torch.device:
        return self._live[source].values.device

    def refuse_changed(self, source: str) -> None:
        """Raise a SaveError if the values of `source` are seen to be others than at the call.

        torch counts what changes a tensor, but not through ``.data``, and not what other code does to its memory. So
        some bytes are compared, too, spread over all.
        """
        live = self._live[source]
        is_counted = live.version is not None and live.values._version != live.version
        sample = self._samples[live.kind][live.row : live.row + len(live.watched)]
        if is_counted or not torch.equal(live.watched.view(torch.uint8), sample.view(torch.uint8)):
            raise SaveError(
                f"{source}: expected the values of the call of save_state, as long as they are not written and no "
                "optimizer steps; found other ones. Something else has changed them: an edit in place, averaged "
                "weights that were swapped in, or a step that calls no hooks of torch. Nothing was published: what "
                "was there before still is. Call take_values() of the pending save before such changes, or save with "
                'snapshot_bytes="all".'
            )


def _zeros(holding: Holding) -> torch.Tensor:
    """Zeros that take no memory: the system gives pages of them when they are read."""
    count = holding.box.numel if holding.is_whole else holding.stop - holding.start
    nothing = torch.from_numpy(numpy.zeros(count * holding.dtype.itemsize, dtype=numpy.uint8))
    return nothing.view(holding.dtype)


def _spread(values: torch.Tensor) -> torch.Tensor:
    """A view of a few bytes of flat `values` in each of equal parts of them; the last part counts up to the end."""
    count = max(1, _SAMPLE_BYTES // values.itemsize)
    if values.numel() < _SAMPLES * count:
        return values
    step = (values.numel() - count) // (_SAMPLES - 1)
    return values.as_strided((_SAMPLES, count), (step, 1), values.storage_offset())
