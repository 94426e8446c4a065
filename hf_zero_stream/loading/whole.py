"""Says of models that a rank loads whole inside ``streaming()`` why they do not stream, and which line to change.

Some is known before the load: no process group, no config. That of ZeRO-3 may come later; then DeepSpeed cuts a model
that every rank has in full.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers.utils import logging

from ..bindings.install import callers_line
from ..bindings.table import WHOLE, installed
from ..seams.ds_config import active_config
from ..settings.config import (
    announced_local_rank,
    announced_ranks,
    announces_zero3,
    announces_zero3_init,
)
from .arguments import is_one_of_several


logger = logging.get_logger(__name__)

_ABOVE = "Move the line that creates TrainingArguments(...) or Accelerator() above from_pretrained(...), and keep it"


def warn_of_stock_load(why: str) -> None:
    """Say once that ranks leave a load to transformers, because of `why`."""
    if not _rank():
        logger.warning_once(
            f"hf_zero_stream leaves this load to transformers, because {why}. It reads the checkpoint by its "
            "own code, and nothing is shared."
        )


def warn_of_late_config() -> None:
    """Say once that this load cannot stream, if accelerate announces a config of ZeRO-3 that is not there."""
    if announced_local_rank():  # the process group may not exist yet
        return
    if announces_zero3() and announces_zero3_init():
        logger.warning_once(
            "The launcher announces DeepSpeed ZeRO-3, but no DeepSpeed config object is alive yet, so this model is "
            f"loaded in full on every rank. {_ABOVE}."
        )
    elif announces_zero3():
        logger.warning_once(
            "The launcher announces DeepSpeed ZeRO-3 with zero3_init_flag: false, so this model is loaded in full on "
            "every rank. Set zero3_init_flag: true in the accelerate config to stream it."
        )


def warn_without_group(path: Any) -> None:
    """Say once that this load cannot stream, if a launcher announces ranks that have no process group yet."""
    if announced_ranks() > 1 and not announced_local_rank() and not announces_zero3():
        logger.warning_once(
            f"hf_zero_stream: {path} does not stream ({callers_line()}): a launcher announces {announced_ranks()} "
            "ranks, but there is no process group and no DeepSpeed config yet. So each rank that makes this load "
            f"loads all of it by itself. {_ABOVE}; or call deepspeed.init_distributed() before, or "
            "torch.distributed.init_process_group()."
        )


_lines = weakref.WeakKeyDictionary[nn.Module, str]()
"""Models of which nothing has been said, though this rank may have loaded them whole, and the lines that did."""


def expect_zero3(model: Any, path: Any) -> None:
    """Have DeepSpeed say so if it partitions `model` later, which has been loaded without a config of ZeRO-3."""
    if not is_one_of_several() or announces_zero3() or active_config()[1]:
        return  # there is one, or all has been said
    _lines[model] = f"{path} has been loaded whole by every rank ({callers_line()})"
    installed(WHOLE).while_alive(model)


def partition(original: Callable[..., Any], self: Any, ds_config: Any, module: nn.Module, *args: Any) -> Any:
    """DeepSpeed's way of models that are not partitioned yet."""
    for part in module.modules():
        if (loaded := _lines.pop(part, "")) and not _rank():
            logger.warning(
                f"hf_zero_stream: {loaded}, and is partitioned only now: there was no config of ZeRO-3 when it was "
                f"loaded. {_ABOVE}; or give the config to StreamingAutoModel....from_pretrained(ds_config=...)."
            )
    return original(self, ds_config, module, *args)


def _rank() -> int:
    """This rank, or its number on its host, as long as there is no process group."""
    return dist.get_rank() if dist.is_initialized() else announced_local_rank()
