"""What is in the arena: weights that are in use, those that come next, and those that were in use last."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, groupby

import torch

from ...plugin_api import bytes_text
from .arena import Arena
from .weights import FrozenWeight, WeightFiles, layer_of


logger = logging.getLogger(__name__)

STALL_SECONDS = 60.0
"""A read of one weight that takes longer is told."""


class Supply:
    """Gives weights by number, and reads ahead in a thread of its own.

    A *pass* is one run through the model, forward alone or forward and backward; what it asks for, and in which order,
    the next pass of its kind will ask for again. Before the first one, numbers are taken to rise, and then to fall, as
    in a model's layers. So it is known what comes next: as much as the arena holds of it is read ahead, in this order,
    and of what was in use that alone stays which comes before what else there would be room for. Backward goes through
    the layers as forward has left them: its first ones are still there.
    """

    def __init__(
        self, weights: Mapping[int, FrozenWeight], files: WeightFiles, arena: Arena, *, whole_layers: bool = False
    ) -> None:
        """`whole_layers`: the weights of a layer are taken together, and not module by module."""
        self._weights, self._files, self._arena, self._whole_layers = weights, files, arena, whole_layers
        self._most_in_layer = max(Counter(layer_of(weight.name) for weight in weights.values()).values(), default=0)
        self._asking = threading.Lock()
        """Whoever waits for a weight has it: a save reads in several threads."""
        self._changed = threading.Condition()
        """Guards all below."""
        self._ready: dict[int, torch.Tensor] = {}
        """What has been read and nobody uses; what was used longest ago comes first."""
        self._in_use: set[int] = set()
        self._wanted: int | None = None
        """What is waited for."""
        self._failed: BaseException | None = None
        """Why that could not be read."""
        self._orders: dict[str, list[int]] = {}
        """What each kind of pass asked for last time."""
        self._kind, self._seen, self._at = "", list[int](), 0
        """The pass that is on, what it has asked for, and up to where that is all of the order of the last one."""
        self._early = set[int]()
        """Places in that order, not far behind, that were asked for too."""
        self._misses = 0
        """What was asked for, one after the other, that was not expected near."""
        self._reads_ahead = True
        """Whether a pass asks; a save would take the room of what was read ahead for it, again and again."""
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="hf_zero_stream-frozen")
        self._is_working = False
        self._has_warned = False
        self.bytes_read = 0

    def begin_pass(self, kind: str) -> None:
        with self._changed:
            self._begin(kind)
            self._reads_ahead = True
            self._go_on()

    def _begin(self, kind: str) -> None:
        if self._seen:
            self._orders[self._kind] = self._seen
        self._kind, self._seen, self._at, self._early, self._misses = kind, [], 0, set(), 0

    def take(self, number: int, *, in_order: bool = True) -> torch.Tensor:
        """The bytes of a weight (uint8), once they are there; only those that are taken `in_order` belong to the pass.

        Raises what reading them raised.
        """
        weight = self._weights[number]
        with self._asking, self._changed:
            self._reads_ahead = in_order
            if in_order:
                self._note(number)
            self._in_use.add(number)
            if number not in self._ready:
                self._wanted = number
                self._go_on()
                while number not in self._ready and self._failed is None:
                    if not self._changed.wait(STALL_SECONDS):
                        logger.warning(f"reading {weight.name} from {self._files.path_of(weight)} takes long")
                failed, self._wanted, self._failed = self._failed, None, None
                if failed is not None:
                    self._in_use.discard(number)
                    raise failed
            memory = self._ready.pop(number)
            self._go_on()
        return memory

    def give_back(self, number: int, memory: torch.Tensor, *, keeps: bool = True) -> None:
        """Note that a weight is in use no more; what it `keeps` may be taken again without being read."""
        with self._changed:
            self._in_use.discard(number)
            if keeps:
                self._ready[number] = memory
            self._go_on()

    def _note(self, number: int) -> None:
        self._seen.append(number)
        if len(self._seen) > 8 * len(self._weights):  # nobody begins passes: the model's own forward is not called
            self._begin(self._kind)
        # Within a layer the order may be another one than was expected. What stands further away is for later, unless
        # a layer's worth was asked for without any of what is near: then this pass leaves a part of the model out.
        order, reach = self._order, self._most_in_layer
        near = range(self._at, len(order) if self._misses >= reach else min(len(order), self._at + reach))
        found = next((at for at in near if at not in self._early and order[at] == number), None)
        if found is None:
            self._misses += 1
            return
        if found >= self._at + reach:
            self._at, self._early = found, set()
        self._misses = 0
        self._early.add(found)
        while self._at in self._early:
            self._early.remove(self._at)
            self._at += 1

    @property
    def _order(self) -> list[int]:
        if self._kind not in self._orders:
            numbers = sorted(self._weights)
            in_layers = groupby(numbers, lambda number: layer_of(self._weights[number].name))
            together = [[*layer] for _, layer in in_layers] if self._whole_layers else [[number] for number in numbers]
            self._orders[self._kind] = [*numbers, *chain.from_iterable(reversed(together))]
        return self._orders[self._kind]

    def _go_on(self) -> None:
        """Have the thread look for what is to be read, if it has gone to rest."""
        if not self._is_working:
            self._is_working = True
            self._worker.submit(self._work)

    def _work(self) -> None:
        """Read one weight after the other, until there is nothing to read, or no room."""
        while True:
            failed: BaseException | None = None
            number = memory = None
            with self._changed:
                try:
                    number, memory = self._next()
                except BaseException as error:
                    failed = error
                if memory is None and failed is None:
                    self._is_working = False
                    return
            if number is not None and memory is not None:
                try:
                    self._files.read(self._weights[number], memory)
                except BaseException as error:
                    failed = error
            with self._changed:
                if failed is None and number is not None and memory is not None:
                    self._ready[number] = memory
                    self.bytes_read += self._weights[number].plan.cost.bytes_read
                elif self._wanted is not None and number in (None, self._wanted):
                    self._failed = failed
                self._changed.notify_all()
                if failed is not None and not self._is_awaited():  # who needs it reads it again, and gets the error
                    self._is_working = False
                    return
            memory = None

    def _is_awaited(self) -> bool:
        """Whether somebody waits for a weight that is still to be read."""
        return self._wanted is not None and self._wanted not in self._ready and self._failed is None

    def _next(self) -> tuple[int | None, torch.Tensor | None]:
        """What is to be read next, and where to; None if there is nothing, or no room."""
        coming = self._coming()
        if self._wanted is not None and self._is_awaited():
            nbytes = self._weights[self._wanted].nbytes
            memory = self._room(nbytes, chain(self._others(coming), reversed(coming)))
            return self._wanted, self._beside(nbytes) if memory is None else memory
        number = next((number for number in coming if number not in self._ready), None)
        if number is None or not self._reads_ahead:
            return None, None
        return number, self._room(self._weights[number].nbytes, self._others(coming))

    def _coming(self) -> list[int]:
        """The weights that are asked for next, as many as there is room for beside those in use."""
        room = self._arena.nbytes - sum(self._weights[number].nbytes for number in self._in_use)
        order, found = self._order, dict[int, None]()
        for at in chain(range(self._at, len(order)), range(self._at)):
            number = order[at]
            if at in self._early or number in found or number in self._in_use or number not in self._weights:
                continue
            room -= self._weights[number].nbytes
            if room < 0:
                break
            found[number] = None
        return [*found]

    def _others(self, coming: Collection[int]) -> Iterator[int]:
        """What is ready and does not come next; what somebody has waited for is taken in a moment."""
        return (number for number in [*self._ready] if number not in coming and number not in self._in_use)

    def _room(self, nbytes: int, spare: Iterable[int]) -> torch.Tensor | None:
        """Memory of the arena, for which weights that are `spare` are dropped one after the other; None without."""
        pending = iter(spare)
        while (memory := self._arena.take(nbytes)) is None:
            number = next(pending, None)
            if number is None:
                return None
            self._ready.pop(number, None)
        return memory

    def _beside(self, nbytes: int) -> torch.Tensor:
        """Memory beside the arena, whose parts are all in use, or kept by autograd."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"frozen weights that are in use at the same time take more than {bytes_text(self._arena.nbytes)} "
                "(frozen_bytes): others are read into memory beside it. If the model is trained without gradient "
                "checkpointing, autograd keeps them all: model.train(); model.gradient_checkpointing_enable()."
            )
        return torch.empty(nbytes, dtype=torch.uint8)
