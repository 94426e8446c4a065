"""What each arm does inside a rank.

An arm is a function that imports what a script has imported by then, and returns the work to be timed: in `ours` with
the imports of hf_zero_stream, in both arms that make a model with those of its code. A script that trains has imported
the Trainer, which brings a thousand modules; without it, whichever `from_pretrained` comes first imports most of them.
The work returns what it loaded, so that it stays in memory until the figures are taken.
"""

import importlib.util
import json
import os
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


REQUEST_BYTES = 8 << 20


@dataclass(frozen=True)
class Task:
    """One load by one set of ranks, as every rank is told."""

    arm: str
    cache: str
    """warm or cold."""

    folder: str
    auto_class: str
    cast: bool
    """The file is in fp32, the partitions in bf16."""

    touches_memory: bool = True
    """Memory is used and given back before the load is timed."""

    @property
    def shards(self) -> list[Path]:
        return sorted(Path(self.folder).glob("*.safetensors"))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Task":
        return cls(**json.loads(text))


Work = Callable[[], Any]


def stock(task: Task) -> Work:
    """transformers and DeepSpeed as they are: `from_pretrained` while an `HfDeepSpeedConfig` is alive."""
    import transformers
    from transformers import Trainer  # noqa: F401 - as in a script
    from transformers.integrations import HfDeepSpeedConfig

    keep_alive = HfDeepSpeedConfig(_ds_config())
    auto_class = getattr(transformers, task.auto_class)

    def work() -> Any:
        model = auto_class.from_pretrained(task.folder, dtype=torch.bfloat16)
        model.kept_config = keep_alive
        return model

    return work


def ours(task: Task) -> Work:
    """The streaming Auto class."""
    from transformers import Trainer  # noqa: F401 - as in the other arm
    from transformers.integrations import deepspeed  # noqa: F401

    def work() -> Any:
        import hf_zero_stream

        auto_class = getattr(hf_zero_stream, f"Streaming{task.auto_class}")
        return auto_class.from_pretrained(task.folder, dtype=torch.bfloat16, ds_config=_ds_config())

    return work


def raw(task: Task) -> Work:
    """The limit of a plain loop: rank r of N reads the r-th 1/N of each shard into fresh memory, with one thread."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def work() -> list[torch.Tensor]:
        loaded = []
        for path in task.shards:
            size = path.stat().st_size
            start, stop = size * rank // world_size, size * (rank + 1) // world_size
            target = torch.empty(stop - start, dtype=torch.uint8)
            view = memoryview(target.numpy())
            file = os.open(path, os.O_RDONLY)
            done = 0
            while done < len(view):
                done += os.preadv(file, [view[done : done + REQUEST_BYTES]], start + done)
            os.close(file)
            loaded.append(target)
        return loaded

    return work


def slices(task: Task) -> Work:
    """safetensors' own slices: rank r of N takes the r-th 1/N of the rows of each tensor."""
    from safetensors import safe_open

    rank, world_size = dist.get_rank(), dist.get_world_size()

    def work() -> list[torch.Tensor]:
        loaded = []
        for path in task.shards:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    part = file.get_slice(name)
                    rows = part.get_shape()[0]
                    rows_of_rank = part[rows * rank // world_size : rows * (rank + 1) // world_size]
                    # A slice is a view of the mapped file: nothing is read before it is copied.
                    loaded.append(rows_of_rank.clone())
        return loaded

    return work


def fastsafetensors(task: Task) -> Work:
    """fastsafetensors without GPUDirect: each rank reads whole shards, and rows are scattered over the ranks."""
    from fastsafetensors import SafeTensorsFileLoader

    world_size = dist.get_world_size()

    def work() -> list[torch.Tensor]:
        loader = SafeTensorsFileLoader(dist.group.WORLD, "cpu", nogds=True)
        shards = [str(path) for path in task.shards]
        loader.add_filenames({rank: shards[rank::world_size] for rank in range(world_size)})
        buffer = loader.copy_files_to_device()
        # Gloo scatters equal parts only; what does not divide is broadcast whole.
        return [
            buffer.get_sharded(name, dim=0).clone()
            if loader.get_shape(name)[0] % world_size == 0
            else buffer.get_tensor(name).clone()
            for name in loader.get_keys()
        ]

    return work


def runai_model_streamer(task: Task) -> Work:
    """Run:ai Model Streamer: every rank streams every tensor and keeps its rows."""
    from runai_model_streamer import SafetensorsStreamer

    rank, world_size = dist.get_rank(), dist.get_world_size()

    def work() -> list[torch.Tensor]:
        loaded = []
        with SafetensorsStreamer() as streamer:
            streamer.stream_files([str(path) for path in task.shards])
            for _, tensor in streamer.get_tensors():
                rows = len(tensor)
                loaded.append(tensor[rows * rank // world_size : rows * (rank + 1) // world_size].clone())
        return loaded

    return work


ARMS: dict[str, Callable[[Task], Work]] = {
    arm.__name__: arm for arm in (stock, ours, raw, slices, fastsafetensors, runai_model_streamer)
}
MODEL_ARMS = ("stock", "ours")
"""Arms that make a partitioned model; the others only read."""

OPTIONAL_ARMS = ("fastsafetensors", "runai_model_streamer")


def available_arms() -> list[str]:
    """The arms whose libraries are installed."""
    return [name for name in ARMS if name not in OPTIONAL_ARMS or importlib.util.find_spec(name)]


def owned_bytes(loaded: Any) -> int:
    """Bytes that a rank keeps: its partitions, or the tensors that it read."""
    if isinstance(loaded, torch.nn.Module):
        return sum(param.ds_tensor.nbytes for param in loaded.parameters())
    return sum(tensor.nbytes for tensor in loaded)


def digest(model: torch.nn.Module) -> str:
    """A checksum of this rank's partitions without their padding: equal if two arms loaded the same bits."""
    checksum = 0
    for name, param in sorted(model.named_parameters()):
        part = param.ds_tensor
        used = max(0, min(part.numel(), param.ds_numel - part.numel() * param.ds_zero_partition_rank))
        checksum = zlib.crc32(name.encode(), checksum)
        checksum = zlib.crc32(part.detach()[:used].view(torch.uint8).numpy(), checksum)
    return f"{checksum:08x}"


def _ds_config() -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
    }
