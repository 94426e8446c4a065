"""What ranks on paper GPUs run: many trials one after the other in one process, and its set-ups of training."""

import gc
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers.distributed import DistributedConfig
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import hf_zero_stream
from hf_zero_stream import StreamingConfig
from tests.support.fsdp2 import announce
from tests.support.parity import differences, ds_config, unequal
from tests.support.sharded import even_inputs, sharded_differences


Trial = Callable[[], Any]

FAULTS = "faults"
"""The name of what :func:`in_one_process` adds: what would hang, or give wrong values, on real GPUs."""

COMMON = {"dtype": torch.bfloat16, "attn_implementation": "eager", "experts_implementation": "eager"}
QUIET = {"progress": False}

SMALL_READS = {"staging_bytes": 8 * 2**16}
"""What passes through the device is next to nothing beside a small model."""


def in_one_process(trials: Mapping[str, Trial]) -> dict[str, Any]:
    """What each trial returns; of the first that fails the traceback, and nothing of those after it (all ranks)."""
    from tests.paper_gpu.cuda import paper

    found: dict[str, Any] = {}
    for name, trial in trials.items():
        try:
            found[name] = trial()
        except Exception:
            found[name] = traceback.format_exc()
            break
        gc.collect()
    return {**found, FAULTS: paper.faults()}


def outcome(results: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    """What a trial returned on each rank; fails the test if it, or the one before it, has failed."""
    assert [of_rank[FAULTS] for of_rank in results] == [[]] * len(results)
    for rank, of_rank in enumerate(results):
        if name not in of_rank:
            pytest.fail(f"{name} was not tried: {[*of_rank][-2]} has failed")
        if isinstance(of_rank[name], str):
            pytest.fail(f"{name} failed on rank {rank}:\n{of_rank[name]}")
    return [of_rank[name] for of_rank in results]


def plain_model(folder: Path) -> Any:
    unset_hf_deepspeed_config()  # an engine of an earlier trial may not be freed yet
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **COMMON)


def batches(count: int, device: torch.device, first: int = 0) -> list[dict[str, torch.Tensor]]:
    """Inputs of steps, the same on all ranks."""
    made = []
    for step in range(first, first + count):
        inputs = even_inputs()
        tokens = inputs["input_ids"].roll(step, -1).to(device)
        made.append({"input_ids": tokens, "labels": tokens})
    return made


def engine_losses(engine: Any, count: int = 3, first: int = 0) -> list[float]:
    losses = []
    for inputs in batches(count, engine.device, first):
        loss = engine(**inputs, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def zero_config(stage: int, zero: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **ds_config(torch.bfloat16, **zero),
        # Buckets of a gigabyte would be filled with NaN for each of many trials.
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 2**16, "allgather_bucket_size": 2**16, **zero},
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0,
    }


def streaming(settings: Mapping[str, Any] | None) -> AbstractContextManager[Any]:
    """Of a load with these settings; of stock's if they are None."""
    return nullcontext() if settings is None else hf_zero_stream.streaming(StreamingConfig(**{**QUIET, **settings}))


def zero_engine(model: Any, config: dict[str, Any]) -> Any:
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def zero_model(folder: Path, config: dict[str, Any], settings: Mapping[str, Any] | None) -> Any:
    """As a script of a user does it: transformers knows DeepSpeed's config, and no argument of ours is used."""
    torch.manual_seed(11)
    with streaming(settings):
        keep = HfDeepSpeedConfig(config)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **COMMON)
        model.keeps_zero3_on = keep
    return model


def zero_differences(model: Any, plain: Any, stage: int) -> list[str]:
    return differences(model, plain, torch.bfloat16) if stage == 3 else unequal(model, plain)


def zero(folder: Path, stage: int, zero: Mapping[str, Any], settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Train three steps under ZeRO, streamed with these `settings`, or by stock: losses, and what differs.

    What is streamed is loaded once more, into the engine that has trained.
    """
    plain = plain_model(folder)  # before the other one: that keeps ZeRO-3 on
    config = zero_config(stage, zero)
    model = zero_model(folder, config, settings)
    found = {} if settings is None else {"differences": zero_differences(model, plain, stage)}
    engine = zero_engine(model, config)
    found["losses"] = engine_losses(engine)
    if settings is not None:
        with streaming(settings):
            hf_zero_stream.load_into(engine, str(folder))
        found["loaded into"] = zero_differences(engine.module, plain, stage)
    engine.destroy()
    return found


def zero_states(folder: Path, stage: int, zero: Mapping[str, Any], target: Path) -> dict[str, Any]:
    """Save weights, train, save the state while training goes on, go back to it, and go on."""
    unset_hf_deepspeed_config()
    config = zero_config(stage, zero)
    engine = zero_engine(zero_model(folder, config, {}), config)
    hf_zero_stream.save_pretrained(engine, target / "weights")
    engine_losses(engine, 2)
    pending = hf_zero_stream.save_state(engine, target / "state", asynchronous=True)
    going_on = engine_losses(engine, 2, first=2)
    pending.wait()
    hf_zero_stream.load_state(engine, target / "state")
    found = {"going on": going_on, "again": engine_losses(engine, 2, first=2)}
    engine.destroy()
    return found


def zero_resumed(folder: Path, stage: int, zero: Mapping[str, Any], target: Path) -> list[float]:
    """The losses of the steps after the state in `target`, at another number of ranks."""
    config = zero_config(stage, zero)
    engine = zero_engine(zero_model(folder, config, {}), config)
    hf_zero_stream.load_state(engine, target / "state")
    losses = engine_losses(engine, 2, first=2)
    engine.destroy()
    return losses


def step(model: Any, optimizer: Any, inputs: Mapping[str, torch.Tensor]) -> float:
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def losses_of(model: Any, optimizer: Any, count: int = 3, first: int = 0) -> list[float]:
    model.train()
    return [step(model, optimizer, inputs) for inputs in batches(count, torch.device("cuda"), first)]


def sharded_model(folder: Path, sizes: Mapping[str, int], settings: Mapping[str, Any] | None) -> tuple[Any, Any]:
    """A model that ``distributed_config`` shards, and its optimizer."""
    unset_hf_deepspeed_config()
    torch.manual_seed(11)
    with streaming(settings):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, distributed_config=DistributedConfig(**sizes), **COMMON
        )
    # foreach=False: on a GPU torch takes all tensors together, and cannot where only some are DTensors.
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def by_transformers(folder: Path, sizes: Mapping[str, int], settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """As :func:`zero`, sharded by ``distributed_config``."""
    plain = plain_model(folder)
    model, optimizer = sharded_model(folder, sizes, settings)
    found = {} if settings is None else {"differences": sharded_differences(model, plain)}
    found["losses"] = losses_of(model, optimizer)
    return found if settings is None else {**found, "loaded into": loaded_into(model, folder, plain, settings)}


def loaded_into(model: Any, folder: Path, plain: Any, settings: Mapping[str, Any]) -> list[str]:
    """What differs after the checkpoint was loaded once more, into shards that have been trained."""
    with streaming(settings):
        hf_zero_stream.load_into(model.eval(), str(folder))
    return sharded_differences(model, plain)


def sharded_states(folder: Path, sizes: Mapping[str, int], target: Path) -> dict[str, Any]:
    """As :func:`zero_states`, sharded by ``distributed_config``."""
    model, optimizer = sharded_model(folder, sizes, {})
    hf_zero_stream.save_pretrained(model, target / "weights")
    losses_of(model, optimizer, 2)
    pending = hf_zero_stream.save_state(model, target / "state", optimizer=optimizer, batch_size=1, asynchronous=True)
    going_on = losses_of(model, optimizer, 2, first=2)
    pending.wait()
    hf_zero_stream.load_state(model, target / "state", optimizer=optimizer, batch_size=1)
    return {"going on": going_on, "again": losses_of(model, optimizer, 2, first=2)}


def sharded_resumed(folder: Path, sizes: Mapping[str, int], target: Path) -> list[float]:
    """As :func:`zero_resumed`, sharded by ``distributed_config``."""
    model, optimizer = sharded_model(folder, sizes, {})
    hf_zero_stream.load_state(model, target / "state", optimizer=optimizer)
    return losses_of(model, optimizer, 2, first=2)


def by_accelerate(folder: Path, offload: bool, settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """As :func:`zero`, by accelerate's FSDP2."""
    AcceleratorState._reset_state(reset_partial_state=True)
    announce(offload_params=offload, cpu_ram_efficient_loading=settings is not None, reshard_after_forward=True)
    plain = plain_model(folder)
    accelerator = Accelerator()
    torch.manual_seed(11)
    with streaming(settings):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **COMMON)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = accelerator.prepare(model, optimizer)
    found = {} if settings is None else {"differences": sharded_differences(model, plain)}
    found["losses"] = losses_of(model, optimizer)
    if settings is not None:
        found["loaded into"] = loaded_into(model, folder, plain, settings)
    for name in [name for name in os.environ if name.startswith(("FSDP_", "ACCELERATE_"))]:
        del os.environ[name]
    return found


def zero_memory(
    folder: Path, stage: int, zero: Mapping[str, Any], settings: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, tuple[int, int]]:
    """What the footprint says of this rank's GPU under ZeRO, and what its allocator saw, in bytes."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    plain_model(folder)
    gc.collect()
    torch.ones(1, 1, device=device, dtype=torch.bfloat16).mm(torch.ones(1, 1, device=device, dtype=torch.bfloat16))
    # From here on cuBLAS has its workspace, 64 MiB of an H100, in torch's allocator.
    before = torch.cuda.memory_allocated(device)

    def peak() -> int:
        seen = torch.cuda.max_memory_allocated(device) - before
        torch.cuda.reset_peak_memory_stats(device)
        return seen

    peak()
    config = {**zero_config(stage, zero), "hf_zero_stream": {**SMALL_READS, **settings}}
    model = zero_model(folder, config, {**SMALL_READS, **settings})
    ranks = torch.distributed.get_world_size()
    planned = hf_zero_stream.plan(folder, world_size=ranks, ds_config=config, dtype="bfloat16", device="cuda").memory
    footprint = model.streaming_report.footprint if stage == 3 else planned
    found = {} if "cuda" not in footprint.load_peak else {"load": (footprint.load_peak["cuda"], peak())}
    engine = zero_engine(model, config)
    found["start"] = (footprint.start_peak["cuda"], peak())
    inputs = batches(1, device)[0]
    for _ in range(2):
        engine.backward(engine(**inputs, use_cache=False).loss)
        found["passes"] = (footprint.passes_peak["cuda"], peak())
        engine.step()
        found["step"] = (footprint.step_peak["cuda"], peak())
    found["held"] = (footprint.held["cuda"], torch.cuda.memory_allocated(device) - before)
    engine.destroy()
    return found


def sharded_memory(folder: Path) -> dict[str, tuple[int, int]]:
    """As :func:`zero_memory`, under FSDP2."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    model, _ = sharded_model(folder, {"fsdp_size": torch.distributed.get_world_size()}, SMALL_READS)
    footprint = model.streaming_report.footprint
    found = {"load": (footprint.load_peak["cuda"], torch.cuda.max_memory_allocated(device) - before)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(**batches(1, device)[0], use_cache=False).loss.backward()
        torch.cuda.reset_peak_memory_stats(device)
        optimizer.step()
        found["step"] = (footprint.step_peak["cuda"], torch.cuda.max_memory_allocated(device) - before)
    found["held"] = (footprint.held["cuda"], torch.cuda.memory_allocated(device) - before)
    return found


def join_a_new_group() -> None:
    """Of the same ranks, and bound to no device."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore("again", dist.TCPStore(address, port, is_master=False, wait_for_workers=False))
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size)
