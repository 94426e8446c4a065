"""Where steps find checkpoints, and leave what they save."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import Qwen3MoeConfig

from benchmarks.moe_checkpoint import moe_config, tensor_shapes, write_checkpoint


@dataclass(frozen=True)
class Setting:
    """The folder of a day's results, and the size of the checkpoint of `speed`, in 10^9 bytes."""

    folder: Path
    gigabytes: float

    def small(self) -> Path:
        """A checkpoint to train, of sizes that 2 divides, of a twentieth of that (all ranks)."""
        config = moe_config(self.gigabytes / 20 * 1e9, num_layers=2, num_experts=8)
        config.num_key_value_heads = config.num_attention_heads
        return self._made("small", config)

    def large(self) -> Path:
        """The checkpoint to time (all ranks)."""
        return self._made("large", moe_config(self.gigabytes * 1e9, num_layers=8, num_experts=128))

    def _made(self, kind: str, config: Qwen3MoeConfig) -> Path:
        folder = self.folder / f"{kind}-{self.gigabytes:g}"
        if dist.get_rank() == 0 and not (folder / "model.safetensors.index.json").exists():  # written last
            write_checkpoint(folder, config, list(tensor_shapes(config)))
        dist.barrier()
        return folder

    def new_folder(self, name: str) -> Path:
        """An empty folder to save into (all ranks)."""
        folder = self.folder / name
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        dist.barrier()
        return folder


Step = Callable[[Setting], tuple[dict[str, Any], bool]]
"""Returns figures, by name, and whether all is as it should be (all ranks)."""
