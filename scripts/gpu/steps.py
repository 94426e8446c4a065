"""The steps of `correctness` and of `ranks`: what the tests try on paper GPUs, here on a real one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from . import speed
from .setting import Setting, Step


__all__ = ["COMMANDS", "TRANSPORTS", "Setting", "transport"]

_TWO_ON_ONE = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo"}
TRANSPORTS: dict[str, dict[str, str]] = {
    "transport hosts": {**_TWO_ON_ONE, "GPU_DAY_HOSTS": "1"},  # each rank says that it is a host of its own
    "transport shared": {**_TWO_ON_ONE, "NCCL_MULTI_RANK_GPU_ENABLE": "1"},  # from NCCL 2.30 on
    "transport gloo": {"GPU_DAY_BACKEND": "gloo"},
}
"""Ways for two ranks to talk where there is one GPU: NCCL refuses two that it sees to share one."""

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


def doctor(setting: Setting) -> tuple[dict[str, Any], bool]:
    done = subprocess.run(
        [sys.executable, "-m", "hf_zero_stream", "doctor"], capture_output=True, text=True, timeout=120
    )
    return {"printed": done.stdout.strip().splitlines()[-1:]}, done.returncode == 0


def lanes(setting: Setting) -> tuple[dict[str, Any], bool]:
    """So small reads that pinned buffers come round again while copies out of them are under way."""
    import hf_zero_stream
    from tests.paper_gpu.trials import plain_model

    expected = dict(plain_model(setting.small()).named_parameters())
    wrong = []
    for _ in range(3):
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
            hf_zero_stream.load_into(
                model, str(setting.small()), config=hf_zero_stream.StreamingConfig(progress=False)
            )
            different = sharded_differences(model, trials.plain_model(setting.small()))
        return trials.losses_of(model, torch.optim.AdamW(model.parameters(), lr=1e-3)), different

    (ours, different), (stock, _) = losses(True), losses(False)
    return {"losses": ours, "not sharded": stock, "differences": different[:8]}, ours == stock and not different


def planned(setting: Setting) -> tuple[dict[str, Any], bool]:
    """The memory of ZeRO-3 that a plan says, against the allocator's peaks, beside what was there before."""
    from tests.paper_gpu.trials import zero_memory

    found = zero_memory(setting.small(), {})
    ratios = {phase: round(said / max(1, seen), 3) for phase, (said, seen) in found.items()}
    return {"planned to measured": ratios}, all(abs(ratios[phase] - 1) <= 0.03 for phase in ("load", "start", "step"))


def marked(setting: Setting) -> tuple[dict[str, Any], bool]:
    """The tests that need a GPU, and have no paper one of their own."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/core/test_lanes.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return {"printed": done.stdout.strip().splitlines()[-1:]}, done.returncode == 0


def transport(setting: Setting) -> tuple[dict[str, Any], bool]:
    total = torch.full((2**20,), float(dist.get_rank() + 1), device="cuda")
    dist.all_reduce(total)
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return {"backend": dist.get_backend(), "NCCL": version}, bool((total == 3).all())


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


ZERO = {
    "ZeRO-3": Training("zero", (3, {})),
    "ZeRO-3 with pinned parameters": Training("zero", (3, {"offload_param": PINNED})),
    "ZeRO-3 with a pinned optimizer": Training("zero", (3, {"offload_optimizer": PINNED})),
    "stage 2": Training("zero", (2, {})),
}
RESUMED = {"ZeRO-3 resumed": Resuming("zero_states", (3, {}))}

COMMANDS: Mapping[str, Mapping[str, Step]] = {
    "correctness": {
        "doctor": doctor,
        "lanes": lanes,
        "marked": marked,
        **ZERO,
        "FSDP2": fsdp2,
        **RESUMED,
        "plan": planned,
    },
    "ranks": {
        "ZeRO-3": ZERO["ZeRO-3"],
        "stage 2": ZERO["stage 2"],
        "FSDP2 by distributed_config": Training("by_transformers", ({"fsdp_size": 2},)),
        "FSDP2 by accelerate": Training("by_accelerate", (False,)),
        "FSDP2 by accelerate on the host": Training("by_accelerate", (True,)),
        "TP": Training("by_transformers", ({"tp_size": 2},)),
        **RESUMED,
        "FSDP2 resumed": Resuming("sharded_states", ({"fsdp_size": 2},)),
        "killed": killed,
    },
    "speed": speed.STEPS,
}
