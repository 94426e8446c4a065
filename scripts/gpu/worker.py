"""One rank of a command: runs its steps, and writes a line about each. Ends at the first that fails."""

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

from .steps import COMMANDS, TRANSPORTS, Setting, transport


def main(task: dict[str, Any]) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    backend = os.environ.get("GPU_DAY_BACKEND", "nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    bound = {"device_id": device} if backend == "nccl" else {}
    dist.init_process_group(backend, timeout=timedelta(minutes=5), **bound)
    steps = {**COMMANDS[task["command"]], **dict.fromkeys(TRANSPORTS, transport)}
    setting = Setting(Path(task["folder"]), task["gigabytes"])
    with open(task["results"], "w", encoding="utf-8") as results:
        for name in task["names"]:
            began = time.perf_counter()
            try:
                figures, ok, error = *steps[name](setting), {}
            except Exception:
                figures, ok, error = {}, False, {"error": traceback.format_exc()}
            seconds = time.perf_counter() - began
            gc.collect()  # a model of ZeRO-3 that is still there would make the next one such a one
            print(json.dumps({"step": name, "ok": ok, "seconds": seconds, "figures": figures, **error}), file=results)
            results.flush()
            os.fsync(results.fileno())
            if not ok:
                os._exit(1)  # what the step has left behind could disturb the next one
    os._exit(0)  # processes that a step has killed, or groups it has left, cannot hold this one up


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
