"""The plan of a weight stream in a world that stands only on paper: DeepSeek-V3 under ZeRO-3 on 512 ranks.

    python -m benchmarks.stream_plan --model deepseek-v3 --world 512

The model has no memory, and every rank says that it holds its share of each parameter; the plan is real. Without a
gather, the engine's workers get the plan too, of each bucket before it: of all tensors, or, of many workers, of the
experts of each.
"""

import argparse
import pickle
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.scale import MODELS


def share(numel: int, rank: int, world: int) -> tuple[int, int]:
    """The elements of a parameter that ZeRO-3 gives a rank."""
    size = -(-numel // world)
    return min(numel, rank * size), min(numel, (rank + 1) * size)


def model_of(config: Any) -> nn.Module:
    """Parameters have no memory; buffers are zero."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for module in model.modules():
        module._buffers = {key: torch.zeros(each.shape, dtype=each.dtype) for key, each in module._buffers.items()}
    return model


@contextmanager
def world_on_paper(model: nn.Module, world: int) -> Iterator[None]:
    """Inside, this process is rank 0 of a world whose other ranks answer as they would."""
    from hf_zero_stream.holdings import holder
    from hf_zero_stream.planning.boxes import ParameterBox
    from hf_zero_stream.ranks.coordinator import Coordinator
    from hf_zero_stream.saving.parameters import _Told

    def holdings(model: Any, params: Mapping[str, Any], *, masters: bool, rank: int, world_size: int) -> Any:
        return {
            name: holder.Holding(
                ParameterBox.whole(tuple(param.shape)), param.dtype, *share(param.numel(), rank, world), nullcontext
            )
            for name, param in params.items()
        }

    def all_gather(self: Any, value: Any, error: BaseException | None = None) -> list[Any]:
        if error is not None:
            raise error
        held, digest = value if isinstance(value, tuple) and len(value) == 2 else (None, None)
        if not (isinstance(held, list) and held and isinstance(held[0], _Told)):
            return [value] * world
        return [(pickle.loads(of_rank), digest) for of_rank in told]

    sizes = [param.numel() for param in model.parameters()]
    told = [
        pickle.dumps([_Told(None, *share(numel, rank, world), False, None) for numel in sizes])
        for rank in range(world)
    ]
    coordinator = Coordinator(0, world, alone=False)
    with (
        patch.object(holder, "HOLDERS", [holdings]),
        patch.object(Coordinator, "of_default_group", lambda: coordinator),
        patch.object(Coordinator, "all_gather", all_gather),
        patch.object(Coordinator, "watched", lambda self, *_: nullcontext()),
    ):
        yield


def read_by(worker: int, workers: int, tensors: Any) -> dict[str, Any]:
    """What a worker reads: of experts its own, as expert parallelism deals them out, and all of the rest."""
    from hf_zero_stream.plugins.stream.reads import whole

    experts = (re.search(r"experts\.(\d+)\.", each.name) for each in tensors)
    mine = (expert is None or int(expert[1]) % workers == worker for expert in experts)
    return {each.name: whole(each.shape) for each, is_mine in zip(tensors, mine, strict=True) if is_mine}


def layouts_of(bucket: Any, read: list[dict[str, Any]]) -> Iterator[Any]:
    from hf_zero_stream.plugins.stream.direct import plan_messages, sliced

    yield from [plan_messages(bucket, 0)] if len(read) == 1 else sliced(bucket, 0, read)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Plan a weight stream of a very large world.")
    parser.add_argument("--model", default="deepseek-v3", choices=MODELS)
    parser.add_argument("--world", type=int, default=512)
    parser.add_argument("--workers", type=int, default=32, help="of the engine")
    parser.add_argument("--bucket-mib", type=int, default=256)
    settings = parser.parse_args(arguments)
    import hf_zero_stream
    from hf_zero_stream.plugins.stream.wire import encoded

    model = model_of(MODELS[settings.model][0]())
    with world_on_paper(model, settings.world):
        began = time.perf_counter()
        stream = hf_zero_stream.weight_stream(model, bucket_bytes=settings.bucket_mib << 20)
        plan_s = time.perf_counter() - began
    nbytes = sum(max(bucket.nbytes.values()) for bucket in stream.buckets)
    began = time.perf_counter()
    rounds = sum(len(bucket.rounds) for bucket in stream.buckets)
    rounds_s = time.perf_counter() - began
    print(f"{settings.model}, {settings.world} ranks: {len(stream.metadata)} tensors, {nbytes / 1e12:.2f} TB")
    print(f"plan {plan_s:.1f} s; {stream.bucket_count} buckets, of which each is planned when it is sent:")
    print(f"  {rounds} rounds, {1000 * rounds_s / stream.bucket_count:.1f} ms for a bucket")
    for workers in (1, settings.workers):
        began = time.perf_counter()
        read = [read_by(worker, workers, stream.metadata) for worker in range(workers)]
        layouts = [each.layout for bucket in stream.buckets for each in layouts_of(bucket, read)]
        nbytes_of_plan = sum(len(encoded(each)) for each in layouts)
        seconds = time.perf_counter() - began
        messages = sum(len(each.messages) for each in layouts)
        shared, mine = (sum(each.nbytes for each in layouts if each.is_shared == is_so) for is_so in (True, False))
        print(
            f"without a gather, {workers} workers: {messages} messages, {shared / 1e9:.0f} GB to all and "
            f"{mine / workers / 1e9:.0f} GB to each; a plan of {nbytes_of_plan / 2**20:.1f} MiB, "
            f"{1000 * seconds / stream.bucket_count:.1f} ms for a bucket"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
