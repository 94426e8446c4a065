"""Steps about bits, losses, resumes, memory and deaths: what the tests try on paper GPUs, here on a real one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .setting import Setting, Step, gigabytes_per_second, timed


PINNED = {"device": "cpu", "pin_memory": True}


@dataclass(frozen=True)
class Training:
    """Three steps of a trial of :mod:`tests.paper_gpu.trials`, streamed, and by stock twice as a control.

    ``load_into`` is in it.
    """

    trial: str
    arguments: tuple[Any, ...]

    def __call__(self, setting: Setting) -> tuple[dict[str, Any], bool]:
        from tests.paper_gpu import trials

        trial = partial(getattr(trials, self.trial), setting.small(), *self.arguments)
        ours, stock, again = trial({}), trial(None)["losses"], trial(None)["losses"]
        repeats = stock == again
        figures = {"losses": ours["losses"], "stock": stock, "stock again": "the same" if repeats else again}
        different = ours["differences"] + ours["loaded into"]
        if different:
            figures["differences"] = different[:8]
        return figures, not different and (ours["losses"] == stock or not repeats)


@dataclass(frozen=True)
class Resuming:
    """A save of weights, a state saved while the training goes on, and a resume of it."""

    trial: str
    arguments: tuple[Any, ...]

    def __call__(self, setting: Setting) -> tuple[dict[str, Any], bool]:
        from tests.paper_gpu import trials

        target = setting.new_folder(self.trial)
        found = getattr(trials, self.trial)(setting.small(), *self.arguments, target)
        return found, found["going on"] == found["again"]


def lanes(setting: Setting) -> tuple[dict[str, Any], bool]:
    """So small reads that pinned buffers come round again while copies out of them are under way."""
    import hf_zero_stream
    from tests.paper_gpu.trials import plain_model

    expected = dict(plain_model(setting.small()).named_parameters())
    wrong = []
    for _ in range(1):
        model = plain_model(setting.small()).cuda()
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(float("nan"))
        config = hf_zero_stream.StreamingConfig(staging_bytes=8 * 4096, reader_threads=4, progress=False)
        with hf_zero_stream.streaming(config):
            hf_zero_stream.load_into(model, str(setting.small()))
        wrong += [name for name, param in model.named_parameters() if not torch.equal(param.cpu(), expected[name])]
    return {"wrong": wrong[:8]}, not wrong


def fsdp2(setting: Setting) -> tuple[dict[str, Any], bool]:
    """Into shards that are on the device; with one rank accelerate does not shard, and ``fully_shard`` does."""
    from torch.distributed.fsdp import fully_shard

    import hf_zero_stream
    from tests.paper_gpu import trials
    from tests.support.sharded import sharded_differences

    def losses(is_sharded: bool) -> tuple[list[float], list[str]]:
        model, different = trials.plain_model(setting.small()).cuda(), []
        if is_sharded:
            for layer in (*model.model.layers, model):
                fully_shard(layer)
            with torch.no_grad():
                for param in model.parameters():
                    param.fill_(float("nan"))
            with trials.streaming({}):
                hf_zero_stream.load_into(model, str(setting.small()))
            different = sharded_differences(model, trials.plain_model(setting.small()))
        return trials.losses_of(model, torch.optim.AdamW(model.parameters(), lr=1e-3)), different

    (ours, different), (stock, _) = losses(True), losses(False)
    return {"losses": ours, "not sharded": stock, "differences": different[:8]}, ours == stock and not different


def planned(setting: Setting) -> tuple[dict[str, Any], bool]:
    """The memory of ZeRO-3 that a plan says, against the allocator's peaks, beside what was there before."""
    from tests.paper_gpu.trials import zero_memory

    found = zero_memory(setting.small(), 3, {})
    ratios = {phase: round(said / max(1, seen), 3) for phase, (said, seen) in found.items()}
    passing = 2 * 2**16  # values may pass through the device in a load, or not
    exact = ratios.keys() - {"passes"}  # these have activations, and less than all that may be gathered
    is_right = all(abs(found[phase][0] - found[phase][1]) <= 0.03 * found[phase][1] + passing for phase in exact)
    return {"planned to measured": ratios}, is_right


def exchange(setting: Setting) -> tuple[dict[str, Any], bool]:
    """How long an agreement takes, and a gather of 64 MiB from each rank."""
    from hf_zero_stream.accelerators import all_gather
    from hf_zero_stream.ranks.coordinator import Coordinator

    who = Coordinator.of_default_group()
    mine = torch.full((2**26,), dist.get_rank() + 1, dtype=torch.uint8, device="cuda")
    everyone = torch.empty(2**26 * dist.get_world_size(), dtype=torch.uint8, device="cuda")
    with who.watched():
        first_s = timed(lambda: who.all_gather(None))[1]
        agreement_s = timed(lambda: [who.agree() for _ in range(20)])[1] / 20
        who.run(all_gather, everyone, mine)
        gather_s = timed(lambda: who.run(all_gather, everyone, mine))[1]
        is_right = all(bool((part == rank + 1).all()) for rank, part in enumerate(everyone.split(2**26)))
        who.agree()
    figures = {
        "backend": dist.get_backend(),
        "first agreement s": round(first_s, 2),
        "agreement ms": round(1e3 * agreement_s, 2),
        "gather GB/s": gigabytes_per_second(2**26, gather_s),
    }
    return figures, is_right


def dies(setting: Setting, collective: Callable[..., Any] | None = None) -> tuple[dict[str, Any], bool]:
    """Rank 1 dies while rank 0 is in a `collective`, by default one that has run before; a last step.

    Rank 0 says so in 15 s, its process goes on, and its device can be used.
    """
    from hf_zero_stream.accelerators import all_gather
    from hf_zero_stream.errors import PeerError
    from hf_zero_stream.ranks.coordinator import Coordinator

    who = Coordinator.of_default_group()
    mine = torch.ones(2**26, dtype=torch.uint8, device="cuda")
    everyone = torch.empty(2**26 * (1 if collective else dist.get_world_size()), dtype=torch.uint8, device="cuda")
    began = time.perf_counter()
    try:
        with who.watched():
            if dist.get_rank() == 1:
                time.sleep(1)
                os._exit(9)
            who.run(collective or all_gather, everyone, mine)
    except PeerError as error:
        seconds = time.perf_counter() - began
        time.sleep(5)  # the watchdog of NCCL would have ended the process
        if mine.cpu()[0] != 1:
            return {"said": "the device is lost"}, False
        return {"said": str(error).partition("\n")[0], "seconds": round(seconds, 1)}, seconds < 15
    return {"said": "nothing"}, False


def killed(setting: Setting) -> tuple[dict[str, Any], bool]:
    """Rank 1 dies in the middle of a load: rank 0 says so in 10 s. The last step, for nobody can go on."""
    from hf_zero_stream.engine.load import Load
    from hf_zero_stream.errors import PeerError
    from tests.paper_gpu import trials

    if dist.get_rank() == 1:
        Load.place = lambda *_, **__: os._exit(9)  # type: ignore[assignment, method-assign]
    began = time.perf_counter()
    try:
        trials.zero_model(setting.small(), trials.zero_config(3, {}), {})
    except PeerError as error:
        seconds = time.perf_counter() - began
        return {"said": str(error).partition("\n")[0], "seconds": round(seconds, 1)}, seconds < 15
    return {"said": "nothing"}, False


FEW: Mapping[str, Step] = {"ZeRO-3": Training("zero", (3, {})), "stage 2": Training("zero", (2, {}))}
OFFLOAD: Mapping[str, Step] = {
    "ZeRO-3 with pinned parameters": Training("zero", (3, {"offload_param": PINNED})),
    "ZeRO-3 with a pinned optimizer": Training("zero", (3, {"offload_optimizer": PINNED})),
}
LANES: Mapping[str, Step] = {"lanes": lanes}
ZERO: Mapping[str, Step] = {**LANES, **FEW, **OFFLOAD}
FSDP2: Mapping[str, Step] = {"FSDP2": fsdp2}
RESUMED: Mapping[str, Step] = {"ZeRO-3 resumed": Resuming("zero_states", (3, {}))}
MEMORY: Mapping[str, Step] = {"plan": planned}
EXCHANGE: Mapping[str, Step] = {"exchange": exchange}
FIRST_SEND: Mapping[str, Step] = {"dies at a first send": partial(dies, collective=dist.all_to_all_single)}
DIES: Mapping[str, Step] = {"dies in a collective": dies}
KILLED: Mapping[str, Step] = {"killed": killed}
TWO_ZERO: Mapping[str, Step] = {**FEW, **RESUMED}
TWO_RESUMED: Mapping[str, Step] = {
    "ZeRO-3 with pinned parameters resumed": Resuming("zero_states", (3, {"offload_param": PINNED}))
}
TWO_SHARDED: Mapping[str, Step] = {
    "FSDP2 by distributed_config": Training("by_transformers", ({"fsdp_size": 2},)),
    "FSDP2 by accelerate": Training("by_accelerate", (False,)),
    "FSDP2 by accelerate on the host": Training("by_accelerate", (True,)),
    "TP": Training("by_transformers", ({"tp_size": 2},)),
}
TWO_SHARDED_RESUMED: Mapping[str, Step] = {"FSDP2 resumed": Resuming("sharded_states", ({"fsdp_size": 2},))}
