"""Digests of values in memory, and of what the checkpoint holds that a model was loaded from: are they the same?

A digest is a sum over the elements (:mod:`..checkpoint.digests`). So each rank reads and sums a part, whatever
it holds of the model, and the digest of a tensor does not depend on the number of ranks.

The checkpoint is read once in a process, by all ranks together, each an equal part, through a bounded buffer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from ..checkpoint.digests import digest_of_values
from ..checkpoint.index import SINGLE
from ..checkpoint.lazy import LazyTensor
from ..checkpoint.state_folder import files_of
from ..destinations.base import Batch, Destination, Item, source_of
from ..engine.execute import run_in_threads
from ..engine.load import Load
from ..engine.places import cached_folder
from ..errors import UnsupportedError
from ..holdings.fsdp import original_class
from ..holdings.holder import holdings
from ..holdings.introspection import LOADED_FROM, is_adapted, whole_of
from ..holdings.own_names import named_buffers, named_parameters
from ..holdings.skeleton import LazyTensorModule, convert_lazy
from ..loading.dry_load import lazily_loaded, lazily_loaded_like
from ..planning.plan import Target
from ..ranks.coordinator import Coordinator
from ..saving.preparation import quiet
from ..seams.ds_config import settings_in_force
from ..settings.values import dtype_name, dtype_named


_WORD = 2**64
_SLICE = 2**22
"""Elements that are cast to another dtype at once."""


class Digest(NamedTuple):
    """The `number` is the sum over all elements; None: ranks do not hold each element once between them."""

    dtype: str
    shape: tuple[int, ...]
    number: int | None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * dtype_named(self.dtype).itemsize

    def to_json(self) -> list[Any]:
        return [self.dtype, list(self.shape), None if self.number is None else f"{self.number:016x}"]

    @classmethod
    def of_json(cls, value: Any) -> Digest:
        """Raises a ValueError or a TypeError if it is not what :meth:`to_json` gives."""
        dtype, shape, number = value
        return cls(dtype_name(dtype_named(dtype)), tuple(map(int, shape)), None if number is None else int(number, 16))


def digests_in_memory(
    model: nn.Module,
    names: Collection[str],
    coordinator: Coordinator,
    threads: int,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> dict[str, Digest]:
    """Digests of the parameters and buffers `names` of `model`, own names, as they are in memory (all ranks).

    Those that are among `dtypes` are cast to another dtype first. Of buffers, which every rank has, rank 0's count.
    """
    dtypes = dtypes or {}
    with coordinator.reporting():
        held = holdings(model, masters=False, rank=coordinator.rank, world_size=coordinator.world_size)
        held = {name: holding for name, holding in held.items() if name in names}
        all_buffers = named_buffers(model, remove_duplicate=False)
        buffers = {name: whole_of(name, buffer) for name, buffer in all_buffers if name in names}
        kinds = {name: (each.dtype, each.box.shape) for name, each in held.items()}
        kinds |= {name: (buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers.items()}
        kinds = {name: (dtypes.get(name, dtype), shape) for name, (dtype, shape) in kinds.items()}
        mine = dict.fromkeys(kinds, (0, 0))

        def work(some: Iterator[str]) -> None:
            for name in some:
                if name in buffers:
                    values = buffers[name].contiguous().view(-1)
                    mine[name] = values.numel(), _digest(values, 0, kinds[name][0])
                    continue
                holding, total = held[name], 0
                known = {} if holding.digests is None else holding.digests
                if kinds[name][0] in known:
                    mine[name] = known[kinds[name][0]]
                    continue
                with holding.open() as values:
                    position = holding.start
                    for first, count in holding.box.runs(holding.start, holding.stop):
                        at = position - holding.first
                        total += _digest(values[at : at + count], first, kinds[name][0])
                        position += count
                mine[name] = known[kinds[name][0]] = holding.stop - holding.start, total

        wanted = [*held, *(buffers if coordinator.is_main else ())]
        run_in_threads(wanted, work, threads)
    everyone = coordinator.all_gather(list(mine.values()))
    found = {}
    for name, of_ranks in zip(mine, zip(*everyone, strict=True), strict=True):
        dtype, shape = kinds[name]
        is_whole = sum(count for count, _ in of_ranks) == torch.Size(shape).numel()
        number = sum(digest for _, digest in of_ranks) % _WORD if is_whole else None
        found[name] = Digest(dtype_name(dtype), tuple(shape), number)
    return found


def _digest(values: torch.Tensor, first: int, *casts: torch.dtype) -> int:
    """The digest of flat `values`, cast to each of `casts` in turn, a bounded number of them at once."""
    if all(dtype == values.dtype for dtype in casts):
        return digest_of_values(values, first)
    total = 0
    for start in range(0, len(values), _SLICE):
        part = values[start : start + _SLICE]
        for dtype in casts:
            part = part.to(dtype)
        total += digest_of_values(part, first + start)
    return total


@dataclass
class _Read:
    """Digests that were looked for in the checkpoints of a model.

    Attributes:
        seen: the name and dtype of each tensor that was looked for.
        found: the names and digests that they have.
    """

    seen: set[tuple[str, str]] = field(default_factory=set)
    found: set[tuple[str, Digest]] = field(default_factory=set)


_read: WeakKeyDictionary[nn.Module, _Read] = WeakKeyDictionary()


def note_in_checkpoint(model: nn.Module, digests: Mapping[str, Digest], others: Mapping[str, Digest]) -> None:
    """Take `digests` for those that the checkpoint of `model` has; it has none of the `others`."""
    known = _read.setdefault(model, _Read())
    known.seen |= {(name, digest.dtype) for name, digest in {**digests, **others}.items()}
    known.found |= {*digests.items()}


def in_checkpoint(
    model: nn.Module, sought: Mapping[str, Collection[Digest]], coordinator: Coordinator
) -> tuple[set[str], str]:
    """The names of `sought` of which the checkpoint of `model` has all digests; what has kept it from being read.

    What has been loaded in one dtype and cast to another is found too (all ranks).
    """
    known = _read.setdefault(model, _Read())
    wanted = {(name, digest.dtype) for name, digests in sought.items() for digest in digests}
    reason = ""
    if not wanted <= known.seen:
        reason = _read_checkpoints(model, sought, known, coordinator)
    return {
        name for name, digests in sought.items() if all((name, digest) in known.found for digest in digests)
    }, reason


def _read_checkpoints(
    model: nn.Module, sought: Mapping[str, Collection[Digest]], known: _Read, coordinator: Coordinator
) -> str:
    """Read all of `sought` in the checkpoint of `model`, and what is not there in those of models inside it."""
    left, reason = dict(sought), ""
    places = _loaded(model)
    if not places:
        reason = "nothing says where the model was loaded from"
    readers = _readers(coordinator)
    for module, place in places:
        mine: dict[tuple[str, str, str], int] = {}
        try:
            mine = _own_part(model, module, place, left, coordinator, readers)
        except Exception as error:  # whatever it is, of users' code too: then nothing is known of the checkpoint
            why = f"{place[0]} cannot be read again: {type(error).__name__}: {error}"
        else:
            why = ""
        totals: dict[tuple[str, str, str], int] = {}
        for part, of_rank in coordinator.all_gather((mine, why)):
            reason = reason or of_rank
            for key, digest in part.items():
                totals[key] = totals.get(key, 0) + digest
        if reason:
            return reason
        shapes = {name: digest.shape for name, digests in left.items() for digest in digests}
        known.found |= {
            (name, Digest(dtype, shapes[name], number % _WORD)) for (name, dtype, _), number in totals.items()
        }
        left = {name: each for name, each in left.items() if any((name, it) not in known.found for it in each)}
        if not left:
            break
    known.seen |= {(name, digest.dtype) for name, digests in sought.items() for digest in digests}
    return reason


def _readers(coordinator: Coordinator) -> list[int]:
    """The ranks that see the checkpoint, by the settings (all ranks)."""
    read_from = settings_in_force().read_from
    is_first = read_from == "local_rank0" and coordinator.topology.position == 0
    if coordinator.is_alone:
        return [coordinator.rank]
    reads = coordinator.all_gather(read_from == "all" or coordinator.is_main or is_first)
    return [rank for rank, it in enumerate(reads) if it]


_Place = tuple[str, Mapping[str, Any]]
"""The path of a checkpoint, and the arguments of ``from_pretrained`` that say which one it is."""


def _loaded(model: nn.Module) -> list[tuple[PreTrainedModel, _Place]]:
    """The models of transformers' in `model`, the outermost first, that are known to have been loaded."""
    modules = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    places = [(module, vars(module)[LOADED_FROM]) for module in modules if LOADED_FROM in vars(module)]
    if modules and LOADED_FROM not in vars(modules[0]) and (name := modules[0].name_or_path):
        places.insert(0, (modules[0], (name, {})))  # loaded outside of streaming()
    return places


def places_of(model: nn.Module) -> str:
    """Where `model` was loaded from, for a message."""
    return ", ".join(place for _, (place, _) in _loaded(model)) or "an unknown place"


def _own_part(
    model: nn.Module,
    module: PreTrainedModel,
    place: _Place,
    sought: Mapping[str, Collection[Digest]],
    coordinator: Coordinator,
    readers: Sequence[int],
) -> dict[tuple[str, str, str], int]:
    """The digests of this rank's part of the checkpoint at `place`, of which `module` of `model` is made.

    By a tensor's own name in `model`, the dtype, and another dtype by way of which it was cast.
    """
    if coordinator.rank not in readers:
        return {}
    settings = settings_in_force()
    found: dict[tuple[str, str, str], int] = {}
    loaded_in = getattr(module.config, "dtype", None)
    kinds = {dtype_named(digest.dtype) for digests in sought.values() for digest in digests} | {loaded_in}
    floating = [dtype for dtype in kinds if isinstance(dtype, torch.dtype) and dtype.is_floating_point]
    widest = reduce(torch.promote_types, floating, torch.bfloat16)  # nothing is rounded on the way

    def see(name: str, first: int, values: torch.Tensor) -> None:
        dtypes = {dtype_named(digest.dtype) for digest in sought[name]}
        if not values.is_floating_point():
            dtypes = {dtype for dtype in dtypes if dtype == values.dtype}
        between = {*dtypes, loaded_in} if values.is_floating_point() else dtypes
        for dtype in dtypes:
            for other in between:
                if isinstance(other, torch.dtype):
                    key = name, dtype_name(dtype), dtype_name(other)
                    found[key] = found.get(key, 0) + _digest(values, first, other, dtype)

    visitor = Visitor(see, readers.index(coordinator.rank), len(readers), settings.staging_on("cpu"))
    settings = replace(settings, strict=False, verify="off", progress=False, read_from="all")
    load = Load(settings, {}, Coordinator.of_this_rank(), visitor)
    path, arguments = place
    with closing(load), quiet(is_main=False), torch.no_grad():
        how = {"dtype": widest, "is_quiet": True, "ignore_mismatched_sizes": True, **arguments}
        try:
            lazy, missing, _ = lazily_loaded_like(module, path, load, **how)
        except UnsupportedError:  # quantised, as transformers dequantises it after a load only
            views = _views_in_files(path, arguments, load)
        else:
            convert_lazy(module, lazy, missing)
            views = _views_in(lazy, missing)
        names, chosen = _names_in(model, module), {}
        for name, aliases in names.items():
            shapes = {digest.shape for digest in sought.get(name, ())}
            for alias in aliases:
                if alias in views and tuple(views[alias].shape) in shapes:
                    chosen[name] = views[alias]
                    break
        wrapped = {name: names[name] for name in sought.keys() & names.keys() - chosen.keys()}
        if wrapped and not is_adapted(model):  # PEFT's wrappers are in no own name
            with suppress(Exception):  # of a class that cannot be built anew
                lazy, missing, _ = lazily_loaded(path, load, original_class(module), **how)
                chosen |= _inside_wrappers(_views_in(lazy, missing), wrapped, sought)
        load.fill(LazyTensorModule(chosen), set(), set())
    return found


Visit = Callable[[str, int, torch.Tensor], None]
"""A function of a name, the number of the first element, and flat values, which are gone afterwards."""


class Visitor(Destination):
    """Calls `visit` with one of `parts` equal parts of all elements of a lazy model, in the order of its tensors.

    Args:
        part: the number of this part.
        buffer_bytes: size of the buffer.
    """

    into = "nothing: they are only looked at"
    hides_zero3 = True

    def __init__(self, visit: Visit, part: int, parts: int, buffer_bytes: int) -> None:
        self._visit, self._part, self._parts, self._buffer_bytes = visit, part, parts, buffer_bytes

    def dtype(self, wanted: torch.dtype | None) -> torch.dtype | None:
        return wanted

    def batches(self, model: nn.Module, missing: set[str], tied: set[str]) -> list[Batch]:
        """Batches that use the buffer one after the other."""
        batches: list[Batch] = []
        items: list[Item] = []
        nbytes = 0
        for item in self._items(model):
            if items and nbytes + item.target.nbytes > self._buffer_bytes:
                batches.append(self._batch(items))
                items, nbytes = [], 0
            items.append(item)
            nbytes += item.target.nbytes
        return [*batches, self._batch(items)] if items else batches

    def _items(self, model: nn.Module) -> Iterator[Item]:
        """Yield this part, in pieces that fit into the buffer; the memory of each comes with its batch."""
        named = [*model.named_parameters(), *model.named_buffers()]
        views = {name: view for name, tensor in named if (view := source_of(tensor)) is not None}
        total = sum(view.numel for view in views.values())
        first, last = (total * number // self._parts for number in (self._part, self._part + 1))
        before = 0
        for name, view in views.items():
            dtype = view.node.dtype
            start, stop = max(first - before, 0), min(last - before, view.numel)
            before += view.numel
            step = max(1, self._buffer_bytes // dtype.itemsize)
            for begin in range(start, stop, step):
                end = min(stop, begin + step)
                yield Item(Target(name, dtype, end - begin, begin, end), view, torch.Tensor)

    def _batch(self, items: list[Item]) -> Batch:
        memory: dict[int, torch.Tensor] = {}

        def begin() -> None:
            memory.update(
                {number: torch.empty(it.target.numel, dtype=it.target.dtype) for number, it in enumerate(items)}
            )

        def finish() -> None:
            for number, it in enumerate(items):
                self._visit(it.target.name, it.target.start, memory.pop(number))

        placed = [Item(it.target, it.view, partial(memory.__getitem__, number)) for number, it in enumerate(items)]
        return Batch(placed, begin, finish, is_temporary=True)


def _views_in(lazy: nn.Module, missing: set[str]) -> dict[str, LazyTensor]:
    named = [*lazy.named_parameters(remove_duplicate=False), *lazy.named_buffers(remove_duplicate=False)]
    return {name: it for name, it in named if name not in missing and isinstance(it, LazyTensor)}


def _views_in_files(path: str, arguments: Mapping[str, Any], load: Load) -> dict[str, LazyTensor]:
    """What a checkpoint has under the names in its files, where what is not quantised has those of the model."""
    folder = cached_folder(path, arguments.get("revision")) / (arguments.get("subfolder") or "")
    pieces = load.open([*map(str, files_of(folder, SINGLE))], None)
    found = {name: it if isinstance(it, torch.Tensor) else it[...] for name, it in pieces.items()}
    return {name: it for name, it in found.items() if isinstance(it, LazyTensor)}


def _inside_wrappers(
    views: Mapping[str, LazyTensor], wrapped: Mapping[str, Sequence[str]], sought: Mapping[str, Collection[Digest]]
) -> dict[str, LazyTensor]:
    """The views of the class's own tensors that are of `wrapped` modules now, such as a user's own adapters wrap.

    There a tensor has a longer name. Another one, taken by mistake, would have another digest.
    """
    of_shape: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, view in views.items():
        of_shape[tuple(view.shape)].append(name)
    found = {}
    for name, aliases in wrapped.items():
        near = [other for digest in sought[name] for other in of_shape[digest.shape]]
        inside = next((other for other in near if any(_is_within(other, alias) for alias in aliases)), None)
        if inside is not None:
            found[name] = views[inside]
    return found


def _is_within(name: str, longer: str) -> bool:
    """Whether the parts of `name` are in `longer`, in this order, and both end alike."""
    parts = iter(longer.split("."))
    return name.rpartition(".")[2] == longer.rpartition(".")[2] and all(part in parts for part in name.split("."))


def _names_in(model: nn.Module, module: nn.Module) -> dict[str, list[str]]:
    """By the first own name of a tensor in `model`, all its own names in `module`, a part of it."""
    first: dict[int, str] = {}
    for name, tensor in [*named_parameters(model), *named_buffers(model)]:
        first.setdefault(id(tensor), name)
    found: dict[str, list[str]] = {}
    for name, tensor in [
        *named_parameters(module, remove_duplicate=False),
        *named_buffers(module, remove_duplicate=False),
    ]:
        if id(tensor) in first:
            found.setdefault(first[id(tensor)], []).append(name)
    return found
