"""What ranks run to train adapters on a base that stays in its files, or is in memory; what a rank reads and takes."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import deepspeed
import peft
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

import hf_zero_stream
from hf_zero_stream.holdings.deepspeed.partitions import own_range
from hf_zero_stream.plugins.from_files.swapper import FileSwapper, swappers_of
from hf_zero_stream.reports.measures import AnonymousMemory
from tests.support.parity import ds_config


SAME = {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0, "stage3_param_persistence_threshold": 0}
"""What a training in memory must be told to gather as one from files does."""

ATTENTION = ("q_proj", "v_proj")
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def config_for(**zero: Any) -> dict[str, Any]:
    return ds_config(torch.bfloat16, **{**SAME, "reduce_bucket_size": 1000000, **zero})


def load(
    folder: Path, config: dict[str, Any], frozen_weights: str, quantization_config: Any = None, **settings: Any
) -> Any:
    keeps = HfDeepSpeedConfig(config)  # transformers knows it as long as this is alive
    with hf_zero_stream.streaming(frozen_weights=frozen_weights, progress=False, **settings):
        how = {} if quantization_config is None else {"quantization_config": quantization_config}
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **how)
    model.config.use_cache = False
    model.keeps = [keeps]
    return model


def adapted(model: Any, modules: Any = ATTENTION, parameters: Any = (), *, checkpointing: bool = True) -> Any:
    """`model` with adapters, in train mode; the same on all ranks and in all processes."""
    torch.manual_seed(0)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    lora = peft.LoraConfig(r=4, lora_alpha=32, target_modules=[*modules], target_parameters=[*parameters] or None)
    return peft.get_peft_model(model, lora)


def engine_of(model: Any, config: dict[str, Any]) -> Any:
    trained = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    engine.train()
    return engine


def steps(engine: Any, count: int, *, first: int = 0, length: int = 16, batch: int = 1) -> Iterator[float]:
    """The losses of `count` steps, each on other tokens, and on other ones on each rank."""
    vocabulary = engine.module.config.vocab_size
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        ids = torch.randint(0, vocabulary, (batch, length), generator=generator)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        yield loss.item()


def digest(model: nn.Module) -> str:
    """A digest of this rank's parts of all that is trained."""
    found = hashlib.sha256()
    for _, param in sorted(model.named_parameters()):
        if param.requires_grad:
            _, start, stop = own_range(param)  # behind it is padding, which nobody sets
            found.update(param.ds_tensor.detach()[: stop - start].view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def train(folder: Path, frozen_weights: str, count: int, how: dict[str, Any]) -> tuple[list[float], str]:
    """The losses of a training, and the digest of its adapters."""
    config = config_for(**how.get("zero", {}))
    model = load(folder, config, frozen_weights, **how.get("settings", {}))
    model = adapted(model, **how.get("adapters", {}))
    engine = engine_of(model, config)
    return [*steps(engine, count)], digest(model)


def measured(folder: Path, how: dict[str, Any]) -> tuple[list[float], int, int]:
    """Of a training from files: what each step reads of this rank, over all frozen bytes; these; and the memory."""
    config = config_for()
    with AnonymousMemory() as memory:
        model = adapted(load(folder, config, "files", **how.get("settings", {})), **how.get("adapters", {}))
        engine, read = engine_of(model, config), list[int]()
        with counted_reads() as bytes_so_far:
            for _ in steps(engine, 4):
                read.append(bytes_so_far())
    nbytes = frozen_bytes(model)
    return [(after - before) / nbytes for before, after in pairwise(read)], nbytes, memory.growth_peak


def swapper_of(model: nn.Module) -> FileSwapper:
    (swapper,) = swappers_of([*model.parameters()])
    return swapper


def frozen_bytes(model: nn.Module) -> int:
    return sum(p.ds_numel * p.dtype.itemsize for p in model.parameters() if not p.requires_grad)


@contextmanager
def counted_reads() -> Iterator[Callable[[], int]]:
    """Gives a function: the bytes that this process has read from files inside, up to when it is called."""

    def read() -> int:
        with open("/proc/self/io") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("rchar"))

    before = read()
    yield lambda: read() - before
