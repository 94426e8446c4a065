"""``save_state()``: everything that training needs to go on, by all ranks; nothing is gathered.

The folder is a checkpoint for ``from_pretrained``, as ``save_pretrained`` writes it, with two more entries::

    latest                                  the name of the folder below, in one line
    global_step12/training_state.json       see record.py
    global_step12/state-*.safetensors       see layout.py
    global_step12/rng.safetensors

The folder of the state stands by itself: no resume reads the weights. Its values are masters where there are any. All
of it is published together, `latest` last. Until then a resume finds the state that was there before.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

from torch import nn
from transformers import PreTrainedModel

from ..bindings import history
from ..bindings.install import shortening
from ..checkpoint.deepspeed_names import entries_of_deepspeed
from ..checkpoint.digests import recorded
from ..errors import ConfigError, SaveError, UnsupportedError
from ..holdings.introspection import is_adapted, is_peft_model, lies_in_files
from ..holdings.own_names import named_parameters
from ..holdings.slots import STEPS, Training
from ..holdings.steps import Steps, unseen_reason
from ..ranks.coordinator import Coordinator, meeting
from ..ranks.rendezvous import SAVE
from ..registry import tool
from ..reports.save import SaveReport
from ..saving.arguments import make_ready, refuse_unknown_arguments, refuse_url
from ..saving.beside import Beside, Kept
from ..saving.pending import PendingSave, note_state, operation
from ..saving.places import Place, Publishing, place_at, places_at, refuse_other_places
from ..saving.preparation import Finalizer, SaveItem, as_save_error
from ..saving.publication import Publication, finish_interrupted
from ..saving.save import Save
from ..seams.ds_config import settings_in_force
from ..settings.config import StreamingConfig
from . import rng, schedules
from .base import split_base
from .digests import places_of
from .foreign import write_guard_files
from .forms import agreed, kept_here, numbered, recorded_options
from .plain import plain
from .record import (
    FILE,
    LATEST,
    GroupRecord,
    StateRecord,
    dtype_of,
    is_tag,
)
from .refusals import (
    keeps_packing,
    refuse_module_entries,
    refuse_optimizer,
    training_of,
)
from .tensors import differing, digests_of_buffers, mark_as_older, names_in, other_names, state_item, weights_item
from .wholes import with_own_options, with_parts


HOST_ARGUMENTS = "files", "facts", "told"
"""What states on hosts are given by those who save them, and users do not give; see their ``HostPlace``."""


@overload
def save_state(
    trained: Any, folder: str | os.PathLike[str], *, asynchronous: Literal[False] = False, **kwargs: Any
) -> SaveReport: ...
@overload
def save_state(
    trained: Any, folder: str | os.PathLike[str], *, asynchronous: Literal[True], **kwargs: Any
) -> PendingSave: ...
@overload
def save_state(
    trained: Any, folder: str | os.PathLike[str], *, asynchronous: bool, **kwargs: Any
) -> SaveReport | PendingSave: ...
@shortening
def save_state(
    trained: Any,
    folder: str | os.PathLike[str],
    *,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    tag: str | None = None,
    data: Any = None,
    beside: Mapping[str, Kept] | None = None,
    batch_size: int | None = None,
    with_weights: bool = True,
    keep_older: bool = True,
    exclude_frozen: bool = False,
    asynchronous: bool = False,
    snapshot_bytes: int | str | None = None,
    hosts: bool = False,
    copies: int = 1,
    keep: int = 1,
    **kwargs: Any,
) -> SaveReport | PendingSave:
    """Save the weights and the training state of a model, such that any number of ranks can go on (all ranks).

    Every rank writes the bytes that it holds. Nothing is pickled. The state has all that a resume reads; the weights
    beside it are for ``from_pretrained`` and inference engines.

    Args:
        trained: a DeepSpeed engine, at any ZeRO stage; or a model, whole or sharded by DTensor (FSDP2, tensor
            parallelism), which `optimizer` trains. If it is not transformers', its weights are saved as states are.
        folder: where to save: a folder, or a URL (``s3://``, ``gs://``, ``az://``). `latest` there names the newest
            state; older ones of other names stay.
        optimizer, scheduler, scaler: what trains a model that is not in an engine; an engine has its own.
        tag: the name of the state's folder; default: ``global_step`` and the number of steps.
        data: anything that JSON can hold and that you will need, such as the position in the data. Each rank may give
            its own, and gets it back.
        beside: by a name of yours, such as ``"ema"``, what you keep for each parameter, or some: an average of
            weights. It is a mapping of parameters' names to tensors (what this rank holds of the parameter, element
            for element: the local shard, the partition; or all of it), or a module with the same parameters.
            :func:`load_state` takes the same, and fills it. In the background, copies of it are written, which take
            host memory of their own.
        batch_size: samples in a step of all ranks, of a model that is not in an engine; needed to go on with another
            number of ranks in a scheduler that accelerate steps once for each rank.
        with_weights: save the weights too; False saves the state alone.
        keep_older: False removes the states that are in `folder` already, once this one is complete.
        exclude_frozen: leave out what is not trained and is seen to be in the checkpoint that the model was loaded
            from, with the same values, as is done for adapters of PEFT. The folder has no weights then, only a state.
        asynchronous: write in the background, from the memory of the training. Each step of the optimizer first has
            those values secured that it is going to change. The next save or load of a training waits until this one
            is complete, and so does the end of the interpreter. Before you change values in place by other means, call
            ``take_values()`` of what is returned.
        snapshot_bytes: the most host memory, in bytes or as in ``"4GiB"``, that copies take on a rank if the save is
            `asynchronous`; a step that needs more waits. ``"all"``: copy everything at the call. Default: the setting
            of this name, and 1/8 of what the rank writes.
        hosts: `folder` is on a disk, or in the memory (``/dev/shm``), of each host: its ranks write there what they
            hold. :func:`load_state` with ``hosts=True`` reads it on any hosts that have all of it between them.
        copies: of what a host writes, on as many other hosts, if `hosts`.
        keep: states that stay in the folders of the `hosts`, this one included.
        kwargs: as for :func:`hf_zero_stream.save_pretrained`: ``max_shard_size``, ``dtype``, ...

    Returns:
        What every rank did. If `asynchronous`, a :class:`PendingSave`, whose ``wait()`` gives that.

    Raises:
        UnsupportedError: the optimizer's state is not elementwise, or gradients are being accumulated.
        ConfigError: an argument or its value is not known. UrlError: nothing can be saved to the URL.
        SaveError: on all ranks, if a file cannot be written on any, or could not be in the background the last time;
            or if something but a step of an optimizer has changed values before they were written in the background.

    Examples:
        >>> hf_zero_stream.save_state(engine, "checkpoints", data={"epoch": 3, "batch": 1200})
    """
    with operation(SAVE, folder=folder) as failed:
        coordinator = Coordinator.of_default_group()
        refuse_unknown_arguments(kwargs, ("dtype", *(HOST_ARGUMENTS if hosts else ())))
        if hosts:
            refuse_url(folder, "save_state(hosts=True)")
        place = None if hosts else place_at(folder)
        training = training_of(trained, optimizer, scheduler, scaler, batch_size, coordinator).without_frozen()
        if place is None:
            place = _host_place(folder, copies, keep, with_weights, training, kwargs)
        saved = _save(
            training,
            place,
            coordinator,
            tag=f"global_step{training.counters[STEPS]}" if tag is None else str(tag),
            data=data,
            beside=beside or {},
            with_weights=with_weights,
            keep_older=keep_older,
            exclude_frozen=exclude_frozen,
            asynchronous=asynchronous,
            failed=failed,
            snapshot_bytes=snapshot_bytes,
            # DeepSpeed has tools for the states of such an engine.
            has_zero=bool(getattr(trained, "zero_optimization", bool)()),
            **kwargs,
        )
    return saved


def _save(
    training: Training,
    place: Place,
    coordinator: Coordinator,
    *,
    tag: str,
    data: Any,
    beside: Mapping[str, Kept],
    with_weights: bool,
    keep_older: bool,
    exclude_frozen: bool,
    asynchronous: bool,
    failed: BaseException | None,
    snapshot_bytes: int | str | None,
    has_zero: bool,
    **kwargs: Any,
) -> SaveReport | PendingSave:
    """Save a `training` to a `place`, for the rest see :func:`save_state` (all ranks).

    `failed`: the error of the save before this one, to another place; raised when this one has begun.
    """
    model = training.model
    refuse_optimizer(training)
    make_ready(model, model, "save_state", "Use the checkpoints of DeepSpeed or accelerate.")
    refuse_module_entries(model)
    if not training.is_between_steps:
        raise UnsupportedError(
            "save_state: gradients are being accumulated, and they are not part of the state. Save after a step."
        )
    here = kept_here(training)
    options = [recorded_options(training.optimizer, each) for each in range(len(training.optimizer.param_groups))]
    # Packed weights lie in memory as in no file of a state; and what stays in files no load may write to.
    stays = keeps_packing(model) or any(map(lies_in_files, model.parameters()))
    has_base = exclude_frozen or is_adapted(model) or stays
    data = plain(data, "data", exactly=True, with_tensors=True)
    random_state = rng.of_this_rank()
    buffers = {} if coordinator.is_alone else digests_of_buffers(model)
    if snapshot_bytes is not None:
        snapshot_bytes = StreamingConfig(snapshot_bytes=snapshot_bytes).snapshot_bytes
    record = _record(training, data, coordinator.world_size)
    if not is_tag(tag):
        raise ConfigError(f"tag: expected the name of a folder; got {tag!r}")
    save = Save(model, place, coordinator=coordinator, is_of_training=True, **kwargs)
    with meeting(SAVE, "a training state", coordinator):
        own_id, names = history.id_of(training.optimizer, makes=True), (tag, list[str]())
        with coordinator.reporting():
            if coordinator.is_main and place.is_shared:
                names = _name(place.location, tag, keep_older)
        mine = here[0], options, record.own, random_state, buffers, own_id, names, place.location
        of_ranks, all_options, own, random_states, of_buffers, ids, names_of_ranks, places = zip(
            *coordinator.all_gather(mine), strict=True
        )
        refuse_other_places(places)
        save.has_one_place = True
        history.set_id(training.optimizer, ids[0])
        name, replaced = names_of_ranks[0]
        kept, forms = agreed(training, here, of_ranks, coordinator)
        different, numbers = numbered(training.slots, forms)
        groups = _groups(training, all_options[0], numbers)
        record = replace(record.with_own_of(own), buffers=differing(of_buffers), training=ids[0])
        record = replace(record, groups=groups, forms=different, keys=kept.keys)
        record = with_parts(record, training, kept, coordinator)
        record = with_own_options(record, training, all_options, coordinator)
        if has_base:
            untrained, digests_of_base = split_base(training, record.buffers, coordinator)
            base = {name: digest.to_json() for name, digest in digests_of_base.items()}
            record = replace(record, untrained=untrained, base=base, base_of=places_of(model))
        with coordinator.reporting():
            apart = Beside.of(model, beside, record.keys, coordinator, copies=asynchronous)
        record = replace(record, beside=[*beside])
        steps = Steps.of_training(training) if asynchronous else Steps()
        items: list[SaveItem] = []
        max_shard_size = kwargs.get("max_shard_size", "5GB")
        if with_weights and (is_adapted(model) or not exclude_frozen):
            weights = _weights(model, save, max_shard_size)
            items.append(replace(weights, changes_with=steps.of_values))
        how: dict[str, Any] = {"steps": steps, "max_shard_size": max_shard_size, "coordinator": coordinator}
        items.append(state_item(training, record, kept, name, apart, **how))
        write_rest = partial(_write_record, name, record, random_states, has_zero)
        finalizer = Finalizer(write_rest, LATEST, replaced)
        saved: SaveReport | PendingSave
        if asynchronous:
            limit, why = _snapshot_limit(training, snapshot_bytes)
            saved = save.start(*items, finalizer=finalizer, steps=steps, snapshot_bytes=limit, copies=why)
        else:
            saved = save.run(*items, finalizer=finalizer)
        if place.is_shared:
            note_state(model, record.training, training.counters[STEPS], saved)
        if asynchronous:  # of this save nobody knows yet whether it will succeed
            coordinator.agree(failed)
    return saved


def _snapshot_limit(training: Training, snapshot_bytes: int | str | None) -> tuple[int, str]:
    """The most bytes that a snapshot may copy, 0 for the usual share; and why everything is copied, if it is."""
    limit = settings_in_force().snapshot_bytes if snapshot_bytes is None else snapshot_bytes
    if isinstance(limit, str):
        return 0, limit
    return limit, training.unseen_steps or unseen_reason(training.optimizer)


def _host_place(
    folder: str | os.PathLike[str],
    copies: int,
    keep: int,
    with_weights: bool,
    training: Training,
    kwargs: dict[str, Any],
) -> Place:
    """The folders of the hosts' own; takes what only they are given out of `kwargs`."""
    host_place = tool("HostPlace", "hosts", "save_state(hosts=True)")
    if not with_weights:
        raise ConfigError("with_weights=False: a state on hosts has its weights; leave it out")
    own = {name: kwargs.pop(name, None) for name in HOST_ARGUMENTS}
    found: Place = host_place(Path(folder), copies=copies, keep=keep, training=training, **own)
    return found


def _weights(model: nn.Module, save: Save, max_shard_size: int | str) -> SaveItem:
    """Give the item beside the state: what transformers' or PEFT's own ``save_pretrained`` saves, if there is one."""
    has_own = isinstance(model, PreTrainedModel) or is_peft_model(model)
    return save.weights() if has_own else weights_item(max_shard_size)


def _groups(training: Training, options: Sequence[Mapping[str, Any]], forms: Mapping[str, int]) -> list[GroupRecord]:
    """What is recorded of the optimizer's groups, with these `options`, and the numbers of `forms` by parameter."""
    order = {name: place for place, (name, _) in enumerate(named_parameters(training.model))}  # the same on all ranks
    found = []
    for number, of_group in enumerate(options):
        members = [member for slot in training.slots if slot.group == number for member in slot.members]
        members.sort(key=lambda member: order[member.name])
        names, shapes = [member.name for member in members], [list(member.box.shape) for member in members]
        found.append(GroupRecord(of_group, names, shapes, [forms[name] for name in names]))
    return found


def _record(training: Training, data: Any, world_size: int) -> StateRecord:
    """The record, without what ranks must agree on first: what the optimizer keeps."""
    scheduler = training.scheduler
    trained = {member.name for slot in training.slots for member in slot.members}
    shared, live = other_names(training.model)
    return StateRecord(
        optimizer=type(training.optimizer).__name__,
        keys=[],
        groups=[],
        forms=[],
        untrained=sorted(names_in(training.model) - trained),
        shared=shared,
        live=live,
        scheduler=None if scheduler is None else schedules.recorded(scheduler),
        scaler=None if training.scaler_state is None else plain(training.scaler_state, "loss scaler"),
        counters=dict(training.counters),
        world_size=world_size,
        batch_size=training.batch_size,
        data=data,
        dtype=dtype_of(training.slots),
    )


def _name(folder: Path | str, tag: str, keep_older: bool) -> tuple[str, list[str]]:
    """(`tag`, or that with a number if something that is no state has this name; what is replaced).

    Raises:
        ConfigError: DeepSpeed's own checkpoint is in `folder` itself: which of the two is to be loaded later?
        SaveError: what is in `folder` cannot be looked at, or what an earlier save has left cannot be finished.
    """
    if isinstance(folder, str):
        return _name_at(folder, tag, keep_older)
    with as_save_error(folder):
        return _name_in(folder, tag, keep_older)


def _name_in(folder: Path, tag: str, keep_older: bool) -> tuple[str, list[str]]:
    finish_interrupted(folder)
    of_deepspeed = entries_of_deepspeed(folder)
    if of_deepspeed and keep_older:
        raise ConfigError(
            f"{folder / of_deepspeed[0]}: a checkpoint of DeepSpeed's own is in the folder. Save into another folder, "
            "or replace it: keep_older=False."
        )
    older = [] if keep_older else [*(path.parent.name for path in folder.glob(f"*/{FILE}")), *of_deepspeed]
    for name in [tag, *(f"{tag}.{number}" for number in range(1, 1000))]:
        place = folder / name
        is_there = os.path.lexists(place)
        if not is_there or (place / FILE).exists() or entries_of_deepspeed(place):
            return name, sorted({*older, *([name] if is_there else [])})
    raise ConfigError(f"{folder / tag}: there are a thousand states of this name")


def _name_at(url: str, tag: str, keep_older: bool) -> tuple[str, list[str]]:
    """Do what :func:`_name` does for a folder; DeepSpeed saves to no URL."""
    places = places_at(url)
    places.finish_interrupted(url)
    there = {name.rstrip("/") for name in places.names(url)}
    states = {name for name in there if FILE in places.names(f"{url}/{name}")} if not keep_older else set()
    for name in [tag, *(f"{tag}.{number}" for number in range(1, 1000))]:
        if name not in there or FILE in places.names(f"{url}/{name}"):
            return name, sorted(states | ({name} & there))
    raise ConfigError(f"{url}/{tag}: there are a thousand states of this name")


def _write_record(
    name: str,
    record: StateRecord,
    random_states: Sequence[rng.Arrays],
    has_zero: bool,
    publication: Publishing,
    digests: Mapping[str, int],
) -> None:
    """Write what of a state is no tensor of its parameters; `digests` are those of its shards."""
    folder = publication.temporary
    place = folder / name
    try:
        place.mkdir(exist_ok=True)  # of an optimizer without elementwise states
        rng.write_ranks(random_states, place / rng.FILE)
        if has_zero:
            write_guard_files(folder, name)
        beside = [each for each in sorted(digests) if not each.startswith(f"{name}/")]
        if isinstance(publication, Publication):
            mark_as_older(folder, beside)
        written = replace(record, weights=beside, digests=recorded(digests, name))
        (place / FILE).write_text(written.to_json(), encoding="utf-8")
        (folder / LATEST).write_text(name, encoding="utf-8")
    except OSError as error:
        raise SaveError(
            f"{folder.parent / name}: cannot finish this training state: {error}. What was there before still is."
        ) from error
