"""A snapshot of what a rank is going to write, which is copied only where a step of an optimizer would change it.

Between two steps nothing changes that is saved. So a thread writes values from the memory of the training, in the
order of the files. Before a step, a hook of torch's optimizers has those secured that the step is going to change.
What is not written yet is copied while there is room, from the end of the files on; the thread that steps writes the
rest itself. Where steps cannot be seen, there is room for everything, and all is copied at the call.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..accelerators import is_accelerator, side_streams
from ..bindings.table import installed
from ..checkpoint.digests import digest_of_bytes
from ..engine.execute import run_in_threads
from ..holdings.steps import Steps, edits_call, uncompiled
from ..ranks.coordinator import Coordinator
from ..registry import PatchScope
from .files import Comparison, ShardWriter
from .live_values import LiveValues
from .parameters import Values, opened
from .plan import Segment
from .preparation import WritePlan
from .room import Room
from .write import PlacedValues, Work, bytes_of, in_runs, pieces_of, write_exchanged


ALL = "all"
"""The setting by which everything is copied, and the reason that needs no saying."""

SHARE = 8
"""Of what a rank writes, 1/8 may be copied, if no setting says more or less."""

Keys = frozenset[int] | None
"""The steps that change values, by ids as in :class:`Steps`; None: any may."""


class Copies(NamedTuple):
    """What a snapshot copies: what `steps` change before they do so, and everything at the call if these are None.

    Attributes:
        nbytes: the most bytes, of what steps change; 0: the usual share.
    """

    steps: Steps | None
    nbytes: int


class _State(Enum):
    LIVE = auto()  # in the memory of the training alone
    TAKEN = auto()  # a thread copies or writes it
    COPIED = auto()
    WRITTEN = auto()


@dataclass(eq=False, slots=True)
class _Unit:
    """What is copied or written at once.

    Attributes:
        sources: those that its values come from.
        copies: shard, position there and bytes of each part, if they are copied.
        memory: where these copies lie.
    """

    segments: Sequence[Segment] = ()
    nbytes: int = 0
    keys: Keys = None
    sources: Set[str] = frozenset()
    state: _State = _State.LIVE
    copies: list[PlacedValues] = field(default_factory=list)
    memory: list[torch.Tensor] = field(default_factory=list)


class Snapshot:
    """What a plan writes, into a `writer`, of the values at the call of :func:`begun_snapshot`.

    Args:
        steps: what steps change; None: everything is copied at the call.
        room: for copies.
        verifies: keep digests of what is written.
    """

    def __init__(self, writer: ShardWriter, steps: Steps | None, room: Room, *, verifies: bool) -> None:
        self._writer, self._room = writer, room
        self._process = os.getpid()
        self._steps, self._known = steps, {id(tensor) for tensor in (steps or Steps()).alive}
        self._values = LiveValues({}, frozenset())
        self._units: OrderedDict[_Unit, None] = OrderedDict()
        """Those that are not written, in the order of the files."""
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._written: list[tuple[int, int, int, int]] | None = [] if verifies else None
        self._watching = ExitStack()
        self.copied_bytes, self.held_seconds = 0, 0.0

    # ------------------------------------------------------------------------------------------------- at the call

    def take_exchanged(self, plan: WritePlan, coordinator: Coordinator) -> None:
        """Take what other ranks give, and watch steps from now on (all ranks)."""
        write_exchanged(plan.plan, plan.parameters, self._take, coordinator)
        if self._steps is None:
            return
        handle = register_optimizer_step_pre_hook(uncompiled(self._before_step))
        self._watching.callback(handle.remove)
        self._watching.enter_context(edits_call(self.secure, self._steps.editors))
        self._watching.enter_context(installed(PatchScope.SAVE))

    def take_what_passes(self, plan: WritePlan, threads: int) -> None:
        """Copy values in memory that does not last, such as buffers, or write them where there is no room."""
        holdings, names = plan.parameters.holdings, plan.parameters.layout.names
        if self._steps is not None:
            self._values = LiveValues(holdings, self._steps.storages)
        lasts: list[Segment] = []
        passes: list[Segment] = []
        for segment in sorted(plan.plan.alone):
            (lasts if all(part.source in self._values for part in segment.parts) else passes).append(segment)

        def work(units: Iterator[_Unit]) -> None:
            for unit in units:
                with opened(holdings) as now:
                    self._copy_or_write(unit, now)

        run_in_threads(units := self._cut(passes, {}), work, threads)
        for unit in units:  # in the order of the files again
            if unit in self._units:
                self._units.move_to_end(unit)
        keys = {source: plan.changes_with[name] for source, name in names.items() if name in plan.changes_with}
        self._units.update(dict.fromkeys(self._cut(lasts, keys)))

    def _cut(self, segments: Iterable[Segment], keys_of: Mapping[str, int]) -> list[_Unit]:
        """Units of these segments, in their order, each of one shard and of as many bytes as a piece of the room.

        `keys_of` are the steps that change a source.
        """
        found: list[_Unit] = []
        size = self._room.piece_bytes
        cut: list[Segment] = []
        nbytes = 0

        def end_unit() -> None:
            nonlocal cut, nbytes
            if cut:
                sources = {part.source for segment in cut for part in segment.parts if isinstance(part.source, str)}
                keys = {keys_of.get(source) for source in sources}
                known = None if None in keys else frozenset(key for key in keys if key is not None)
                found.append(_Unit(cut, nbytes, known, sources))
            cut, nbytes = [], 0

        for segment in segments:
            rest: Segment | None = segment
            if cut and cut[-1].shard != segment.shard:
                end_unit()
            while rest is not None:
                first, after = _split(rest, (size - nbytes) // rest.dtype.itemsize)
                if first is None and cut:
                    end_unit()
                    continue
                first = first or rest  # larger than a piece, and no run
                cut.append(first)
                nbytes, rest = nbytes + first.nbytes, None if first is rest else after
        end_unit()
        return found

    def _take(self, shard: int, position: int, pieces: Sequence[torch.Tensor]) -> None:
        """Copy or write what is in temporary memory; a :data:`.write.Put`."""
        unit = _Unit(nbytes=sum(piece.nbytes for piece in pieces))
        if not self._copies(unit, [(shard, position, [*pieces])]):
            self._put(shard, position, [*map(bytes_of, pieces)])

    def _copy_or_write(self, unit: _Unit, values: Values) -> None:
        if not self._copies(unit, _runs(unit, values)):
            self._write(unit, values)

    # ---------------------------------------------------------------------------------------------- before a step

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        stepped = frozenset(id(param) for group in optimizer.param_groups for param in group["params"])
        if stepped:
            self.secure(stepped if stepped <= self._known else None)

    def secure(self, keys: Keys = None) -> None:
        """Return when nothing is read any more from memory that steps of `keys` change, or any.

        An error is the save's: it is not raised here, and what steps then may change everything.
        """
        if os.getpid() != self._process:
            return  # a forked one has memory of its own, and not the thread that would let it go on
        began = time.perf_counter()
        with self._changed:
            live = [unit for unit in self._units if unit.state is not _State.COPIED]
            units = [unit for unit in live if keys is None or unit.keys is None or unit.keys & keys]
        with suppress(Exception):  # which :meth:`_end` keeps
            for unit in reversed(units):
                if self._begin(unit, may_copy=True):
                    self._end(unit, partial(self._copy_live, unit))
            for unit in units:
                if self._begin(unit):
                    self._end(unit, partial(self._write_live, unit))
            with self._changed:
                self._changed.wait_for(lambda: self._error or not any(unit.state is _State.TAKEN for unit in units))
        self.held_seconds += time.perf_counter() - began

    def _begin(self, unit: _Unit, *, may_copy: bool = False) -> bool:
        """Take a unit for this thread, if it is where it was; to be copied only if there is room."""
        with self._changed:
            if self._error or unit.state is not _State.LIVE:
                return False
            if may_copy:
                memory = self._room.take(unit.nbytes)
                if memory is None:
                    return False
                unit.memory = memory
            unit.state = _State.TAKEN
            return True

    def _end(self, unit: _Unit, work: Callable[[], _State]) -> None:
        try:
            state = work()
        except BaseException as error:
            self._fail(error)
            raise
        with self._changed:
            unit.state = state
            if state is _State.WRITTEN:
                self._units.pop(unit, None)
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _copy_live(self, unit: _Unit) -> _State:
        with self._checked(unit) as values:
            self._fill(unit, _runs(unit, values))
        return _State.COPIED

    def _write_live(self, unit: _Unit) -> _State:
        with self._checked(unit) as values:
            self._write(unit, values)
        return _State.WRITTEN

    @contextmanager
    def _checked(self, unit: _Unit) -> Iterator[Values]:
        """Inside, devices copy beside what training has given them. An error if values are not those of the call."""
        values = self._values
        with ExitStack() as stack:
            for device in sorted({values.device_of(source) for source in unit.sources}, key=str):
                if is_accelerator(device):
                    beside = side_streams(device)[0]
                    stack.enter_context(beside.lock)
                    stack.enter_context(beside.stream)
            for source in unit.sources:
                values.refuse_changed(source)
            yield values
            for source in unit.sources:
                values.refuse_changed(source)

    # --------------------------------------------------------------------------------------------------- copies

    def _copies(self, unit: _Unit, runs: Iterable[tuple[int, int, list[torch.Tensor]]]) -> bool:
        """Copy these values if there is room."""
        with self._changed:
            memory = self._room.take(unit.nbytes)
        if memory is None:
            return False
        unit.memory = memory
        self._fill(unit, runs)
        with self._changed:
            unit.state = _State.COPIED
            self._units[unit] = None
        return True

    def _fill(self, unit: _Unit, runs: Iterable[tuple[int, int, list[torch.Tensor]]]) -> None:
        """Copy into the unit's memory."""
        rooms = iter(unit.memory)
        for part in unit.memory:
            self._room.populate(part)
        room = next(rooms)
        for shard, position, pieces in runs:
            for piece in pieces:
                data = piece.detach().reshape(-1).view(torch.uint8)
                while data.numel():
                    if not room.numel():
                        room = next(rooms)
                    count = min(len(room), data.numel())
                    unit.copies.append((shard, position, room[:count].copy_(data[:count])))
                    room, data, position = room[count:], data[count:], position + count
        with self._changed:
            self.copied_bytes += unit.nbytes

    # ---------------------------------------------------------------------------------------------- in the background

    def write(self, check: Callable[[], None]) -> None:
        """Write all, in the order of the files; `check` is called in between, and may raise."""
        try:
            while (unit := self._next()) is not None:
                check()
                if unit.state is _State.COPIED:
                    self._end(unit, partial(self._write_copies, unit))
                elif self._begin(unit):
                    self._end(unit, partial(self._write_live, unit))
        except BaseException as error:
            self._fail(error)
            raise

    def _next(self) -> _Unit | None:
        """The first unit that no other thread has taken; waits for these if there are no others."""
        with self._changed:
            while self._error is None:
                unit = next((unit for unit in self._units if unit.state is not _State.TAKEN), None)
                if unit is not None or not self._units:
                    return unit
                self._changed.wait()
            raise self._error

    def _write_copies(self, unit: _Unit) -> _State:
        for shard, position, pieces in in_runs(unit.copies):
            self._put(shard, position, [*map(bytes_of, pieces)])
        with self._changed:
            self._room.give_back(unit.memory)
        return _State.WRITTEN

    def _write(self, unit: _Unit, values: Values) -> None:
        for shard, position, pieces in _runs(unit, values):
            self._put(shard, position, [*map(bytes_of, pieces)])

    def _put(self, shard: int, position: int, buffers: Sequence[memoryview]) -> None:
        self._writer.put(shard, position, buffers)
        if self._written is not None:
            self._written.append((shard, position, sum(map(len, buffers)), digest_of_bytes(position, buffers)))

    def verify(self, comparison: Comparison, check: Callable[[], None]) -> None:
        """Compare what is in the files with the digests of what was written."""
        for shard, position, nbytes, digest in self._written or ():
            check()
            comparison.compare(shard, position, nbytes, digest)

    def end(self) -> None:
        """Watch no more steps, and keep nothing alive."""
        self._watching.close()
        self._fail(RuntimeError("the save has ended"))
        for unit in self._units:
            self._room.give_back(unit.memory)
        self._units.clear()
        self._values, self._steps = LiveValues({}, frozenset()), None


def begun_snapshot(work: Work, plan: WritePlan, writer: ShardWriter, copies: Copies) -> Snapshot:
    """Begin a snapshot (all ranks)."""
    made: list[Snapshot] = []
    steps = copies.steps

    def taken() -> None:
        share = plan.plan.bytes_written if steps is None else copies.nbytes or plan.plan.bytes_written // SHARE
        made.append(Snapshot(writer, steps, Room.of_model(work.model, share), verifies=work.verifies))
        made[0].take_what_passes(plan, work.threads)

    try:
        work.coordinator.run_on_all(taken)
        made[0].take_exchanged(plan, work.coordinator)
    except BaseException:
        for snapshot in made:
            snapshot.end()
        raise
    return made[0]


def _runs(unit: _Unit, values: Values) -> Iterator[tuple[int, int, list[torch.Tensor]]]:
    return in_runs(chain.from_iterable(pieces_of(segment, values) for segment in unit.segments))


def _split(segment: Segment, count: int) -> tuple[Segment | None, Segment | None]:
    """The first `count` elements of a segment, and the others; all or nothing of one that is no run."""
    if segment.numel <= count:
        return segment, None
    if count <= 0 or not segment.is_run:
        return None, segment
    (part,) = segment.parts

    def cut(start: int, stop: int) -> Segment:
        box = part.box.narrowed(0, start, stop)
        here = part._replace(box=box._replace(to=0))
        position = segment.position + start * segment.dtype.itemsize
        return segment._replace(position=position, numel=stop - start, parts=(here,))

    return cut(0, count), cut(count, segment.numel)
