"""States on the hosts of a job, beside those on a shared disk: which is newer, every how many steps, and their end."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, overload
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from transformers.utils import logging

from ...errors import ConfigError, SaveError
from ...plugin_api import (
    CLIENT,
    LOAD,
    STEPS,
    Coordinator,
    PendingSave,
    Resumed,
    SaveReport,
    StreamingConfig,
    Training,
    finish_pending,
    history,
    import_object,
    is_plain_name,
    meeting,
    note_state,
    operation,
    refuse_url,
    resume,
    save_state,
    save_under_way,
    training_of,
    unwrapped,
    when_whole,
)
from .choice import mark_of
from .folders import own_folder, remove_states_of
from .load import newest_of_both
from .shared import SharedState, shared_state, state_in_place


logger = logging.get_logger(__name__)

_JOB_VARIABLES = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")


class _Newest(NamedTuple):
    """The newest state that a training has on hosts, or as new a one."""

    model: ref[nn.Module]
    training: str
    steps: int


class HostStates:
    """States of one job, in a folder of each host: on a disk of its own, or in its memory (``/dev/shm``).

    What is left when a job has crashed has the job's name, and the next start of the same training goes on from it.
    After a ``with`` block that ends without an error, and when a Trainer has come to its last step, nothing is left
    once the shared disk has what is as new: see :meth:`remove_when_saved`.

    Args:
        folder: where on each host; the job gets a folder in there, for its user alone.
        copies: of what a host writes, on as many other hosts. So many hosts may be lost at once.
        keep: states of a training that stay, the newest one included.
        job: the name of the job, the same on all hosts and at each start; default: torchrun's ``--rdzv-id``, or the id
            of the Slurm job.

    Raises:
        ConfigError: nothing names the job.

    Examples:
        >>> with hf_zero_stream.HostStates("/dev/shm", copies=1) as states:
        ...     resumed = states.load(engine, "checkpoints")  # whichever is newer
        ...     for step in range(engine.global_steps, 1000):
        ...         train(engine, step)
        ...         if step % 20 == 0:
        ...             states.save(engine)
        ...         if step % 500 == 0:
        ...             hf_zero_stream.save_state(engine, "checkpoints", keep_older=False)
    """

    def __init__(
        self, folder: str | os.PathLike[str] = "/dev/shm", *, copies: int = 1, keep: int = 1, job: str | None = None
    ) -> None:
        announced = [os.environ.get(name, "") for name in _JOB_VARIABLES]
        name = job or next((each for each in announced if each not in ("", "none")), "")
        if not is_plain_name(name) or len(name) > 200:
            raise ConfigError(
                f"job: expected a name that can be that of a folder; got {name!r}. Give HostStates a job=, the same "
                "at each start, or start with torchrun --rdzv-id=NAME."
            )
        refuse_url(folder, "HostStates")
        self.folder = Path(folder) / f"hf_zero_stream-{name}"
        self._copies, self._keep = copies, keep
        self.facts: dict[str, Any] = {}
        """What is known of the training beside its optimizer; see :mod:`.choice`."""
        self._newest: _Newest | None = None

    @overload
    def save(self, trained: Any, *, asynchronous: Literal[False] = False, **kwargs: Any) -> SaveReport: ...
    @overload
    def save(self, trained: Any, *, asynchronous: Literal[True], **kwargs: Any) -> PendingSave: ...
    @overload
    def save(self, trained: Any, *, asynchronous: bool, **kwargs: Any) -> SaveReport | PendingSave: ...
    def save(self, trained: Any, **kwargs: Any) -> SaveReport | PendingSave:
        """Save a state on the hosts (all ranks); for the arguments and errors see :func:`...state.save.save_state`."""
        model = ref(unwrapped(trained))

        def told(training: str, steps: int) -> None:
            self._newest = _Newest(model, training, steps)

        how = {"copies": self._copies, "keep": self._keep, "facts": self.facts, "told": told, **kwargs}
        saved: SaveReport | PendingSave = save_state(trained, self.folder, hosts=True, **how)
        return saved

    def load(self, trained: Any, shared: str | os.PathLike[str] | None = None, **kwargs: Any) -> Resumed | None:
        """Go on from the newest state that is whole: on the hosts, or in the `shared` folder of ``save_state``.

        None, and nothing is loaded, if there is none. What counts is how many steps a training had made. A state on
        hosts is taken if it is of this very training: of the one of the shared state, and set up as this one is. For
        what is not taken, and ahead of what is or of another training, there is a warning.

        For further arguments and errors see :func:`...state.load.load_state`.
        """
        with operation(LOAD):
            refuse_url(shared, "HostStates.load(shared=...)")
            training = _training_of(trained, kwargs)
            self.facts = {} if shared is None else {"shared": os.path.realpath(shared)}
        with meeting(LOAD) as coordinator:
            found, there = newest_of_both(
                self.folder,
                coordinator,
                lambda: mark_of(training, self.facts),
                lambda: SharedState() if shared is None else shared_state(Path(shared)),
            )
            if found is None and (shared is None or there.steps < 0):
                return None
            if found is None and coordinator.is_main:
                logger.info(f"{shared}: its state of step {there.steps} is newer than those on hosts, and is taken.")
            place = Path(str(shared)) if found is None else self.folder / found.name
            resumed = resume(trained, place, meeting=coordinator, **kwargs)
        newest = _Newest(ref(training.model), history.id_of(training.optimizer), resumed.counters.get(STEPS, 0))
        self._newest = newest
        if found is None:
            note_state(training.model, newest.training, newest.steps, resumed)
        return resumed

    def attach(self, trainer: Any, every: int) -> str | None:
        """Have a Trainer save a state on the hosts every so many steps; returns the checkpoint to go on from.

        That is the newest one, on the hosts or in the Trainer's ``output_dir``; None if there is none::

            trainer.train(resume_from_checkpoint=states.attach(trainer, every=20))

        The Trainer saves into its ``output_dir`` as its own arguments say.
        """
        if type(every) is not int or every < 1:
            raise ConfigError(f"every: expected a whole number of steps from 1 on; got {every!r}")
        attach: Callable[..., str | None] = import_object(f"{__package__}.trainers:attach")  # imports the Trainer
        return attach(self, trainer, every)

    def remove(self) -> None:
        """Remove all that this job has on this host, of whatever training; each host must call it."""
        self._finish_pending()
        if self.folder.exists():
            with suppress(SaveError, FileNotFoundError):  # it is somebody else's, or another rank was faster
                shutil.rmtree(own_folder(self.folder), ignore_errors=True)

    def _finish_pending(self) -> None:
        """Wait for the save that is under way if it goes onto the hosts."""
        pending = save_under_way()
        if pending is not None and pending.place == self.folder:
            finish_pending(raises=False)

    def note(self, trained: Any, **own: Any) -> None:
        """Note how far what is `trained` has come, unless a state of it is known here; `own` as for ``save_state``."""
        if self._newest is None:
            training = _training_of(trained, own)
            steps = training.counters[STEPS]
            self._newest = _Newest(ref(training.model), history.id_of(training.optimizer), steps)

    def remove_when_saved(self, *, or_weights: bool = False) -> None:
        """Remove what the training has here once a state of it, as new as that, is whole on the shared disk.

        For that, and for `or_weights`, see :func:`...saving.pending.when_whole`.
        """
        self._finish_pending()  # which may be newer
        newest, self._newest = self._newest, None
        model = None if newest is None else newest.model()
        if newest is None or model is None:
            return
        remove = partial(remove_states_of, self.folder, newest.training, newest.steps)
        is_done = when_whole(model, newest.training, newest.steps, remove, or_weights=or_weights)
        if not is_done and Coordinator.of_default_group().is_main:
            result = "a state of that step, or the saved model," if or_weights else "a state of that step"
            logger.warning(
                f"{self.folder}: the state of step {newest.steps} stays until {result} is whole on the shared disk. "
                "If you need it no more, call HostStates.remove()."
            )

    def __enter__(self) -> HostStates:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.remove_when_saved()


# ----------------------------------------------------------------------------------- by the setting host_states_every


def states_of(folder: str | os.PathLike[str], settings: StreamingConfig) -> HostStates:
    """The states on hosts beside the checkpoints in `folder`, which is the name of their job."""
    place = os.path.realpath(folder)
    job = f"{os.path.basename(place)[:100]}-{hashlib.sha256(place.encode()).hexdigest()[:12]}"
    return HostStates(settings.host_states_folder, copies=settings.host_states_copies, job=job)


def checkpoint_by_settings(trainer: Any, given: Any, settings: StreamingConfig) -> Any:
    """The checkpoint for ``Trainer.train(resume_from_checkpoint=given)``; has it save on hosts too (all ranks).

    It is that of the hosts if `given` asks for the newest one, by True or by its name, and that of the hosts is newer.
    """
    from .trainers import SaveOnHosts, is_last

    output_dir = trainer.args.output_dir
    mine = next((each for each in trainer.callback_handler.callbacks if isinstance(each, SaveOnHosts)), None)
    states = mine.states if mine else states_of(output_dir, settings)
    newest = states.attach(trainer, mine.every if mine else settings.host_states_every)
    if newest is None or newest == given or Path(newest).parent != states.folder:
        return given
    is_asked_for = given is True or (given and is_last(given, output_dir))
    if trainer.is_world_process_zero():
        logger.warning(
            f"{newest}: the training goes on from this state on hosts, which is newer than all in {output_dir}."
            if is_asked_for
            else f"{newest}: this state on hosts is newer than {given or 'the model'}, from which the training is to "
            "begin. resume_from_checkpoint=True goes on from the newest."
        )
    return newest if is_asked_for else given


def state_of_engine(
    engine: Any,
    folder: Path,
    shared: tuple[Path, str | None] | None,
    settings: StreamingConfig,
    coordinator: Coordinator,
) -> Path | None:
    """The state on hosts for ``engine.load_checkpoint(folder)``, if none there is newer (all ranks, in a meeting).

    `shared` is what is there: a folder, and the name of a state of ours in it.
    """
    states = states_of(folder, settings)
    with coordinator.reporting():
        training = _training_of(engine, {})
    found, _ = newest_of_both(
        states.folder, coordinator, lambda: mark_of(training), lambda: state_in_place(folder, shared)
    )
    if found is None:
        return None
    place = states.folder / found.name
    if coordinator.is_main:
        logger.warning(f"{place}: this state on hosts is the newest of {folder} (step {found.steps}), and is taken.")
    return place


def save_between_steps(
    engine: Any, folder: Path, settings: StreamingConfig, client_state: Any, coordinator: Coordinator | None
) -> None:
    """Have an engine save on the hosts every so many steps, before a forward pass (all ranks).

    With a `client_state` on any rank, which only the script knows, nothing is saved: a resume would lack it.
    """
    with meeting(LOAD, coordinator=coordinator) as coordinator:
        has_client_state = any(coordinator.all_gather(bool(client_state)))
    if engine not in _on_hosts:
        _on_hosts[engine] = states_of(folder, settings)
        last = engine.global_steps

        def save(engine: Any, inputs: Any) -> None:
            nonlocal last
            step = engine.global_steps
            if step != last and step % settings.host_states_every == 0 and engine.training and torch.is_grad_enabled():
                last = step
                if (states := _on_hosts[engine]) is not None:
                    states.save(engine, data={CLIENT: {}}, asynchronous=settings.asynchronous_save)

        # Then the optimizer, counters, and a scheduler, whoever steps it, have come to the end of the same step.
        engine.register_forward_pre_hook(save, prepend=True)
    states = _on_hosts[engine]
    if has_client_state and states is not None:
        _on_hosts[engine] = None
        states.note(engine)
        states.remove_when_saved()
        if coordinator.is_main:
            logger.warning(
                f"{folder}: host_states_every saves nothing here, because this script has a client_state for each "
                "step. Call HostStates.save(engine, data=...) in its loop."
            )


_on_hosts: WeakKeyDictionary[Any, HostStates | None] = WeakKeyDictionary()


def _training_of(trained: Any, given: Mapping[str, Any]) -> Training:
    """The training of the arguments that ``save_state`` or ``load_state`` was `given`."""
    own = {name: given.get(name) for name in ("optimizer", "scheduler", "scaler", "batch_size")}
    return training_of(trained, coordinator=Coordinator.of_default_group(), **own)
