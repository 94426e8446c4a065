"""One file of a checkpoint that is going to be written: its name, and which tensors go into it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


__all__ = ["NotedShard"]


@dataclass(frozen=True)
class NotedShard:
    """What transformers would have written into one file.

    Attributes:
        name: of the file, without a folder.
        tensors: by name; lazy ones.
        metadata: texts for the file's header.
    """

    name: str
    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str]
