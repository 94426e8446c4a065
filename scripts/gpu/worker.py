"""One process of a group: runs its steps, and writes a line about each."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .calls import CALLS
from .setting import Group, Setting


STEP_S = timedelta(seconds=60)
"""How long a rank waits for the others to end a step."""


def main(call: str, name: str, results: str, folder: str, gigabytes: float, only: list[str]) -> None:
    (group,) = (each for each in CALLS[call] if each.name == name)
    setting = Setting(Path(folder), gigabytes)
    if group.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
    rank, device = int(os.environ["RANK"]), torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    if group.world_size:
        bound = {"device_id": device} if group.bound else {}
        dist.init_process_group(group.backend, timeout=timedelta(minutes=3), **bound)  # type: ignore[arg-type]
    for number, (step, run) in enumerate(group.steps.items()):
        if only and step not in only:
            continue
        began = time.perf_counter()
        try:
            figures, ok, error = *run(setting), {}
        except Exception:
            figures, ok, error = {}, False, {"error": traceback.format_exc()[-3000:]}
        found = {"group": name, "step": step, "ok": ok, "seconds": round(time.perf_counter() - began, 1)}
        if rank == 0 or not ok:
            keep(results, {**found, **({"rank": rank} if rank else {}), "figures": figures, **error})
        gc.collect()  # a model of ZeRO-3 that is still there would make the next one such a one
        if not _all_come(group, number):
            break
    os._exit(0)  # groups that a step has left cannot hold this one up


def _all_come(group: Group, number: int) -> bool:
    """Whether the other ranks have ended this step, too: by the store, for NCCL may be broken."""
    if group.world_size < 2:
        return True
    store, key = dist.distributed_c10d._get_default_store(), f"gpu-day/{number}"
    try:
        until = time.monotonic() + STEP_S.total_seconds()
        count = store.add(key, 1)
        while count < group.world_size and time.monotonic() < until:
            time.sleep(0.05)
            count = store.add(key, 0)
        return count >= group.world_size
    except RuntimeError:
        return False


def keep(results: str, found: dict[str, Any]) -> None:
    """Append a line to the results, at once and whole, whoever else does too."""
    handle = os.open(results, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, (json.dumps(found) + "\n").encode())
    os.fsync(handle)
    os.close(handle)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
