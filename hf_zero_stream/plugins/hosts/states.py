"""States on the hosts of a job, beside those on a shared disk: which is newer, every how many steps, and their end."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import ref

from transformers import TrainerCallback
from transformers.utils import logging

from ...errors import CheckpointError, ConfigError, SaveError
from ...holdings.training import STEPS
from ...ranks.coordinator import meeting
from ...ranks.rendezvous import LOAD
from ...reports.save import SaveReport
from ...saving.pending import finish_pending
from ...seams.wrappers import checkpoint_number
from ...sources.base import is_plain_name
from ...state.load import Resumed, resume
from ...state.record import CLIENT, FILE, LATEST, StateRecord
from ...state.save import save_state
from .folders import own_folder
from .load import newest_on_hosts


logger = logging.get_logger(__name__)

_JOB_VARIABLES = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")


class HostStates:
    """States of one job, in a folder of each host: on a disk of its own, or in its memory (``/dev/shm``).

    What is left when a job has crashed has the job's name, and the next start of the same job goes on from it. After a
    ``with`` block that ends without an error, and when a Trainer has come to its last step, nothing is left.

    Args:
        folder: where on each host; the job gets a folder in there, for its user alone.
        copies: of what a host writes, on as many other hosts. So many hosts may be lost at once.
        keep: states that stay, the newest one included.
        job: the name of the job, the same on all hosts and at each start; default: torchrun's ``--rdzv-id``, or the id
            of the Slurm job.

    Raises:
        ConfigError: nothing names the job.

    Example:
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
        self.folder = Path(folder) / f"hf_zero_stream-{name}"
        self._copies, self._keep = copies, keep

    def save(self, trained: Any, **kwargs: Any) -> SaveReport:
        """Save a state on the hosts (all ranks); for the arguments and errors see :func:`...state.save.save_state`."""
        how = {"copies": self._copies, "keep": self._keep, **kwargs}
        report: SaveReport = save_state(trained, self.folder, hosts=True, **how)
        return report

    def load(self, trained: Any, shared: str | os.PathLike[str] | None = None, **kwargs: Any) -> Resumed | None:
        """Go on from the newest state that is whole: on the hosts, or in the `shared` folder of ``save_state``.

        None, and nothing is loaded, if there is none. For further arguments and errors see
        :func:`...state.load.load_state`.
        """
        finish_pending()
        with meeting(LOAD) as coordinator:
            found = newest_on_hosts(self.folder, coordinator, raises=False)
            steps = coordinator.broadcast(lambda: _steps_in(shared))
            if found is not None and found.steps >= steps:
                return resume(trained, self.folder / found.name, meeting=coordinator, **kwargs)
            if shared is None or steps < 0:
                return None
            if coordinator.is_main:
                logger.info(f"{shared}: its state of step {steps} is newer than those on hosts, and is taken.")
            return resume(trained, Path(shared), meeting=coordinator, **kwargs)

    def attach(self, trainer: Any, every: int) -> str | None:
        """Have a Trainer save a state on the hosts every so many steps; returns the checkpoint to go on from.

        That is the newest one, on the hosts or in the Trainer's ``output_dir``; None if there is none::

            trainer.train(resume_from_checkpoint=states.attach(trainer, every=20))

        The Trainer saves into its ``output_dir`` as its own arguments say.
        """
        if type(every) is not int or every < 1:
            raise ConfigError(f"every: expected a whole number of steps from 1 on; got {every!r}")
        from .trainer_files import last_checkpoint_in  # imports the Trainer, which takes seconds

        trainer.add_callback(_SaveOnHosts(self, trainer, every))
        with meeting(LOAD) as coordinator:
            found = newest_on_hosts(self.folder, coordinator, raises=False)
            shared = coordinator.broadcast(lambda: last_checkpoint_in(trainer.args.output_dir))
        steps = -1 if shared is None else checkpoint_number(Path(shared).name) or 0
        if found is not None and found.steps >= steps:
            return str(self.folder / found.name)
        return shared

    def remove(self) -> None:
        """Remove all that this job has on this host; each host must call it."""
        if self.folder.exists():
            with suppress(SaveError, FileNotFoundError):  # it is somebody else's, or another rank was faster
                shutil.rmtree(own_folder(self.folder), ignore_errors=True)

    def __enter__(self) -> HostStates:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.remove()


class _SaveOnHosts(TrainerCallback):
    """Saves the training of a Trainer on the hosts, and removes what is there when it has come to its end.

    As the Trainer's own checkpoints, a state has what was logged and evaluated in its step.
    """

    def __init__(self, states: HostStates, trainer: Any, every: int) -> None:
        self._states, self._trainer, self._every = states, ref(trainer), every
        self._awaited = ""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self._every == 0:
            self._awaited = "evaluate" if control.should_evaluate else "log" if control.should_log else "nothing"
            self._save_after("nothing")

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._save_after("log")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._save_after("evaluate")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._save_after(self._awaited)  # what was awaited has not come: another callback has changed it

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:
            self._states.remove()

    def _save_after(self, event: str) -> None:
        trainer = self._trainer()
        if not self._awaited or event != self._awaited or trainer is None:
            return
        self._awaited = ""
        from .trainer_files import trained_by, write_small_files

        trained, own = trained_by(trainer)
        with tempfile.TemporaryDirectory() as folder:
            write_small_files(trainer, Path(folder))
            beside = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        self._states.save(trained, data={CLIENT: {}}, beside=beside, **own)


def _steps_in(folder: str | os.PathLike[str] | None) -> int:
    """The steps of the newest state in a shared folder; -1 if there is none."""
    if folder is None or not (Path(folder) / LATEST).is_file():
        return -1
    place = Path(folder) / (Path(folder) / LATEST).read_text(encoding="utf-8").strip()
    try:
        return StateRecord.read(place / FILE).counters.get(STEPS, 0)
    except CheckpointError:
        return 0  # DeepSpeed's own; or what is wrong with it, loading it says
