"""Turns the ways of accelerate and the Trainer to save into saves by all ranks, inside ``streaming()``.

They end in ``model.save_pretrained(..., state_dict=...)`` with a state dict that was gathered on rank 0. Here that
state dict is lazy, and so saving it is for all ranks. The Trainer calls ``save_pretrained`` on one rank only, within a
``save_model`` that all of them call: there rank 0 leads (see :mod:`.calls`). Code of others that would do more with
the state dict than save it gets stock's. So does a method that somebody has put in place of accelerate's or the
Trainer's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, logging

from ..bindings.install import override_methods
from ..checkpoint.safetensors import NotedShard
from ..errors import UnsupportedError
from ..holdings.introspection import has_partition, is_gathered_whole, lacks_values
from ..ranks.coordinator import Coordinator
from ..ranks.rendezvous import SAVE
from ..seams.adapters import saving_all_adapters
from ..seams.wrappers import (
    belongs_to_trainer,
    has_sharded_model,
    is_defined_by_accelerate,
    is_defined_by_trainer,
    replaced_methods_of,
    saves_by_default,
    unwrapped,
)
from ..settings.scope import active_configs, set_in_context
from ..sources.base import is_url
from . import calls
from .arguments import refuse_url
from .lazy_parameters import state_dict_without_values
from .mirrors import mirrored, url_of
from .pending import noting_weights, operation
from .preparation import SaveItem
from .save import Save


logger = logging.get_logger(__name__)


_asked_by: ContextVar[str] = ContextVar("hf_zero_stream_state_dict_asked_by", default="")
"""Why the values of a state dict will be read, and not only saved; may be empty."""


def get_state_dict(original: Callable[..., Any], self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    if not active_configs() or not has_sharded_model(model):
        return original(self, model, *args, **kwargs)
    inner = unwrapped(model)
    if not lacks_values(inner) and not calls.runs_on_leader():  # rank 0 may be the only one to ask, as in stock
        return original(self, model, *args, **kwargs)
    if is_gathered_whole(inner):  # as stock: rank 0 gets the values, and may save them alone
        return inner.state_dict() if dist.get_rank() == 0 else None
    why = _asked_by.get() or _not_its_own(replaced_methods_of(self))
    if why or (belongs_to_trainer(self, inner) and not calls.runs_on_leader()):
        if dist.get_rank() == 0:
            why = why or (
                "code around the Trainer asks for its state dict: an overridden _save() or save_model(), or a callback"
            )
            logger.warning_once(
                f"The values of the whole model are gathered on rank 0, as without streaming(), because {why}. For a "
                "save by all ranks that gathers nothing, leave saves to accelerate and the Trainer, or call "
                "hf_zero_stream.save_pretrained."
            )
        return original(self, model, *args, **kwargs)
    return state_dict_without_values(inner)


def _not_its_own(methods: Sequence[str]) -> str:
    return f"the accelerator's {' and '.join(methods)} is not accelerate's own" if methods else ""


def save_model(
    original: Callable[..., Any], self: Any, model: Any, save_directory: Any, *args: Any, **kwargs: Any
) -> Any:
    """Save weights and no config, under the model's own names, as accelerate's function does.

    Where each rank has the whole model, this is accelerate's: rank 0 may be the only one to call it.
    """
    call = inspect.signature(original).bind(self, model, save_directory, *args, **kwargs)
    call.apply_defaults()
    is_ours = active_configs() and has_sharded_model(model) and lacks_values(unwrapped(model))
    if not is_ours or is_gathered_whole(unwrapped(model)):
        if active_configs():
            refuse_url(save_directory, "accelerator.save_model of a model that each rank has whole")
        return original(self, model, save_directory, *args, **kwargs)
    why = _not_its_own(replaced_methods_of(self) + ([] if is_defined_by_accelerate(original) else ["save_model"]))
    if not call.arguments["safe_serialization"]:
        why = "save_model(safe_serialization=False) asks for files of torch.save"
    if why:
        refuse_url(save_directory, f"accelerator.save_model, as {why},")
        with set_in_context(_asked_by, why):
            return original(self, model, save_directory, *args, **kwargs)
    if calls.runs_on_leader():
        raise UnsupportedError(
            "accelerator.save_model(): only rank 0 runs this code, and the other ranks wait for a save_pretrained. "
            "Call model.save_pretrained here, or accelerator.save_model on all ranks."
        )

    def lay_out(folder: Path, parameters: Any) -> list[NotedShard]:
        noted: list[NotedShard] = []
        with override_methods(
            self,
            get_state_dict=lambda *_, **__: parameters.entries(),
            save=lambda tensors, file, **_: noted.append(NotedShard(Path(file).name, tensors, {"format": "pt"})),
        ):
            # Its look for parameters that are not there finds none: ZeRO-3's have no elements, but a device.
            original(self, model, folder, call.arguments["max_shard_size"])
        return noted

    with operation(SAVE, folder=save_directory):
        Save(model, save_directory).run(SaveItem(lay_out=lay_out, index_name=SAFE_WEIGHTS_INDEX_NAME))


@noting_weights
def trainer_save_model(
    original: Callable[..., Any], self: Any, output_dir: Any = None, _internal_call: bool = False
) -> Any:
    model: Any = getattr(self, "deepspeed", None) or self.model
    if active_configs() and is_url(url := output_dir or self.args.output_dir):  # all ranks are here
        with mirrored(url) as folder:
            return trainer_save_model(original, self, str(folder), _internal_call)
    to_url = url_of(output_dir) is not None
    is_stocks = not active_configs() or not has_sharded_model(model) or not is_defined_by_trainer(original)
    is_ours = not is_stocks and _saves_as_transformers(self)
    if not to_url and (not is_ours or is_gathered_whole(unwrapped(model))):
        if not active_configs():
            return original(self, output_dir, _internal_call=_internal_call)
        inner, save_rest = unwrapped(model), self._save
        whole = values_outside_models(inner)

        def save_with_them(*args: Any, **kwargs: Any) -> None:
            with whole():
                save_rest(*args, **kwargs)

        with saving_all_adapters(inner), override_methods(self, _save=save_with_them):
            return original(self, output_dir, _internal_call=_internal_call)
    calls.run_on_leader(model, lambda: original(self, output_dir, _internal_call=True), {} if to_url else None)
    if self.args.push_to_hub and not _internal_call:
        self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)


def _saves_as_transformers(trainer: Any) -> bool:
    """Whether what `trainer` does with a state dict is to save it, once; raises on all ranks if several would."""
    if not saves_by_default(trainer):
        return False
    if not trainer.args.save_on_each_node:
        return True
    coordinator = Coordinator.of_default_group()
    with coordinator.watched(SAVE, "the Trainer's model"):
        savers = coordinator.all_gather(bool(trainer.args.should_save))
    if sum(savers) == 1:
        return True
    stage = getattr(getattr(trainer, "deepspeed", None), "zero_optimization_stage", None)
    if stage is not None and stage() < 3:
        return False
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        return False  # all ranks save the weights, and each node's first one the rest
    raise UnsupportedError(
        f"save_on_each_node=True: a model that is sharded is saved once, and {sum(savers)} ranks are to save it. "
        "Stock, too, gives the weights to rank 0 only. Leave it off, and copy the folder from the node of rank 0."
    )


def values_outside_models(model: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """Take whole what `model` has sharded outside of transformers models (all ranks).

    Inside of what is returned, state dicts have these values, each in a memory of its own.
    """
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    inside = {id(param) for each in models for param in each.parameters()}
    whole: dict[int, torch.Tensor] = {}
    of_modules: dict[nn.Module, dict[str, torch.Tensor]] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if id(param) not in inside and (has_partition(param) or hasattr(param, "full_tensor")):
                if id(param) not in whole:
                    whole[id(param)] = _whole(param)
                of_modules.setdefault(module, {})[name] = whole[id(param)]

    def put(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        state_dict.update({f"{prefix}{name}": value for name, value in of_modules[module].items()})

    @contextmanager
    def in_state_dicts() -> Iterator[None]:
        handles = [module.register_state_dict_post_hook(put) for module in of_modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    return in_state_dicts


def _whole(param: Any) -> torch.Tensor:
    if has_partition(param):
        from ..holdings.deepspeed.partitions import whole_value  # imports deepspeed, which takes seconds

        return whole_value(param)
    full: torch.Tensor = param.detach().full_tensor()
    # Uneven shards are gathered with padding, and safetensors refuses a tensor that is less than its storage.
    return full if full.untyped_storage().nbytes() == full.nbytes else full.clone()
