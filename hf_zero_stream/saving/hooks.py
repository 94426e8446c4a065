"""What accelerate's and the Trainer's ways to save become inside ``streaming()``.

They end in ``model.save_pretrained(..., state_dict=...)`` with a state dict that was gathered on rank 0. Here that
state dict is lazy, and so saving it is for all ranks. The Trainer calls ``save_pretrained`` on one rank only, within a
``save_model`` that all of them call: there rank 0 leads (see :mod:`.calls`). Code of others that would do more with
the state dict than save it gets stock's.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.utils import extract_model_from_parallel
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, logging

from .. import patching
from ..errors import UnsupportedError, VersionError
from ..ranks.coordinator import Coordinator, expected_at
from ..ranks.rendezvous import SAVE
from ..scope import active_configs
from ..seams.saving import NotedShard
from . import calls


__all__ = ["REPLACEMENTS", "trainer_patches"]

logger = logging.get_logger(__name__)


def _get_state_dict(original: Callable[..., Any], self: Accelerator, model: Any, *args: Any, **kwargs: Any) -> Any:
    # If the Trainer calls, and was imported only now, rank 0 is going to save alone this once, and needs the values.
    if not active_configs() or trainer_patches.put_in() or not _shares_its_model(model):
        return original(self, model, *args, **kwargs)
    from .gathered import is_gathered_whole  # imports deepspeed, which takes seconds

    unwrapped = extract_model_from_parallel(model, keep_torch_compile=False)
    if is_gathered_whole(unwrapped):  # as stock: rank 0 gets the values, and may save them alone
        return unwrapped.state_dict() if dist.get_rank() == 0 else None
    if _is_of_a_trainer(self) and not calls.is_led():
        logger.warning_once(
            "The values of the whole model are gathered on rank 0, as without streaming(), because code around the "
            "Trainer asks for its state dict: an overridden _save() or save_model(), or a callback. For a save by all "
            "ranks that gathers nothing, leave them to the Trainer, or call hf_zero_stream.save_pretrained."
        )
        return original(self, model, *args, **kwargs)
    from ..destinations.deepspeed.stored import holdings
    from .parameters import lazy_parameters, lazy_state_dict

    held = holdings(unwrapped, masters=False, rank=dist.get_rank(), world_size=dist.get_world_size())
    return lazy_state_dict(unwrapped, lazy_parameters(held, calls.refuse_values), calls.refuse_values)


def _is_of_a_trainer(accelerator: Accelerator) -> bool:
    """Whether a Trainer made `accelerator`, and so others than the caller's own script may ask it for a state dict."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return isinstance(getattr(plugin, "hf_ds_config", None), HfTrainerDeepSpeedConfig)


def _shares_its_model(engine: Any) -> bool:
    """Whether `engine` is DeepSpeed's, with ZeRO, around a model that transformers can save."""
    stage = getattr(engine, "zero_optimization_stage", lambda: 0)()
    return stage > 0 and isinstance(extract_model_from_parallel(engine, keep_torch_compile=False), PreTrainedModel)


def _save_model(
    original: Callable[..., Any], self: Accelerator, model: Any, save_directory: Any, *args: Any, **kwargs: Any
) -> Any:
    """accelerate's function saves weights and no config, under the model's own names."""
    call = inspect.signature(original).bind(self, model, save_directory, *args, **kwargs)
    call.apply_defaults()
    if not active_configs() or not _shares_its_model(model) or not call.arguments["safe_serialization"]:
        return original(self, model, save_directory, *args, **kwargs)
    from .gathered import is_gathered_whole
    from .parameters import lazy_state_dict
    from .save import Save

    unwrapped = extract_model_from_parallel(model, keep_torch_compile=False)
    if is_gathered_whole(unwrapped):
        return original(self, model, save_directory, *args, **kwargs)

    def lay_out(folder: Path, parameters: Any) -> list[NotedShard]:
        noted: list[NotedShard] = []
        vars(self).update(
            get_state_dict=lambda *_, **__: lazy_state_dict(unwrapped, parameters.lazy, parameters.gather),
            save=lambda tensors, file, **_: noted.append(NotedShard(Path(file).name, tensors, {"format": "pt"})),
        )
        try:
            # Its look for parameters that are not there finds none: ZeRO-3's have no elements, but a device.
            original(self, model, folder, call.arguments["max_shard_size"])
        finally:
            del vars(self)["get_state_dict"], vars(self)["save"]
        return noted

    with expected_at(SAVE):
        Save(model, Path(save_directory)).run(lay_out, SAFE_WEIGHTS_INDEX_NAME)
    return None


def _trainer_save_model(
    original: Callable[..., Any], self: Any, output_dir: Any = None, _internal_call: bool = False
) -> Any:
    engine: Any = getattr(self, "deepspeed", None)
    if not active_configs() or not _shares_its_model(engine) or not _saves_as_transformers(self):
        return original(self, output_dir, _internal_call=_internal_call)
    from .gathered import is_gathered_whole

    if is_gathered_whole(engine.module):
        return original(self, output_dir, _internal_call=_internal_call)
    calls.led(engine, lambda: original(self, output_dir, _internal_call=True))
    if self.args.push_to_hub and not _internal_call:
        self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
    return None


def _saves_as_transformers(trainer: Any) -> bool:
    """Whether what `trainer` does with a state dict is to save it, once.

    Raises:
        UnsupportedError: on all ranks, if several of them are to save what only rank 0 could be given.
    """
    if getattr(trainer._save, "__module__", None) != "transformers.trainer":
        return False
    if not trainer.args.save_on_each_node:
        return True
    coordinator = Coordinator.of_default_group()
    with coordinator.watched(SAVE):
        savers = coordinator.all_gather(bool(trainer.args.should_save))
    if sum(savers) == 1:
        return True
    if trainer.deepspeed.zero_optimization_stage() < 3:
        return False
    raise UnsupportedError(
        f"save_on_each_node=True: with ZeRO-3 the model is saved once, and {sum(savers)} ranks are to save it. "
        "Stock, too, gives the weights to rank 0 only. Leave it off, and copy the folder from the node of rank 0."
    )


REPLACEMENTS: dict[tuple[Any, str], patching.Make] = {
    (Accelerator, "get_state_dict"): patching.function(_get_state_dict),
    (Accelerator, "save_model"): patching.function(_save_model),
}


class TrainerPatches:
    """The same for ``save_pretrained``, and for the Trainer once somebody has imported it, which takes seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._patches: patching.Patches | None = None

    def acquire(self) -> None:
        """Begin to replace, now or at the next :meth:`put_in`."""
        calls.patches.acquire()
        with self._lock:
            self._users += 1
        try:
            self.put_in()
        except BaseException:
            self.release()
            raise

    def put_in(self) -> bool:
        """Replace, if the Trainer has been imported; returns whether that was new.

        Raises:
            VersionError: the Trainer is not one that is known.
        """
        with self._lock:
            trainer = sys.modules.get("transformers.trainer")
            if trainer is None or self._patches is not None or not self._users:
                return False
            if not hasattr(trainer.Trainer, "_save"):
                raise VersionError(
                    f"transformers {transformers.__version__} has no Trainer._save; this version is not known to "
                    "hf_zero_stream: install transformers>=5.1,<6 or a newer hf_zero_stream."
                )
            self._patches = patching.Patches({(trainer.Trainer, "save_model"): patching.function(_trainer_save_model)})
            self._patches.acquire()
            return True

    def release(self) -> None:
        """Put the original back once every :meth:`acquire` has been released."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._patches is not None:
                self._patches.release()
                self._patches = None
        calls.patches.release()


trainer_patches = TrainerPatches()
