"""From the death of a host to the next step: a state in the memory of the hosts that are left, or on a shared disk.

    python -m benchmarks.hosts                          # 58M parameters, three hosts of one rank, and two that go on
    python -m benchmarks.hosts --latency 10 --rate 400  # the shared disk: ms for each request, and MB/s

Hosts are simulated on this machine: each has a name, and a folder of /dev/shm of its own. The shared disk is the FUSE
file system of `benchmarks.slow_disk`. The training is ZeRO-3 in bf16 with AdamW. A resume is timed in new processes
which have imported everything, and have their process group and the model: `load` is until the state is there, `step`
the first step after it. Needs root, as mounting in a namespace does. The steps' losses must be the same in both arms.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import machine
from benchmarks.checkpoints import cached_checkpoint
from benchmarks.launch import run, write_figures
from benchmarks.slow_disk import slow_folder
from benchmarks.state import config_of, engine_of
from tests.support.hosts import move_to_host
from tests.support.simulated_hosts import folder_of_host, mount_over


ARMS = ("hosts", "shared")


def _step(engine: Any) -> float:
    tokens = torch.arange(8).view(1, -1)
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    return float(loss)


def measure(what: str, host: str, source: str, memory: str, disks: str, shared: str) -> dict[str, Any]:
    """Save in both ways, or go on in one of them; this rank's figures."""
    import hf_zero_stream

    move_to_host(host)
    mount_over(Path(memory), folder_of_host(Path(disks), host))
    engine = engine_of(source, config_of())
    states = hf_zero_stream.HostStates(memory, job="job")
    dist.barrier()
    began = time.perf_counter()
    if what == "save":
        _step(engine)
        hf_zero_stream.save_state(engine, shared)
        states.save(engine)  # which plans, as the first of a training
        dist.barrier()
        began = time.perf_counter()
        states.save(engine)
    elif what == "hosts":
        states.load(engine)
    else:
        hf_zero_stream.load_state(engine, shared)
    dist.barrier()
    found: dict[str, Any] = {"load": time.perf_counter() - began}
    if what != "save":
        found["loss"] = _step(engine)
        dist.barrier()
    found["seconds"] = time.perf_counter() - began
    if what == "save":
        states.save(engine, asynchronous=True).wait()  # the first makes a process group
        dist.barrier()
        began = time.perf_counter()
        pending = states.save(engine, asynchronous=True)
        found["call"] = time.perf_counter() - began
        pending.wait()
    dist.destroy_process_group()
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time resumes from hosts' memory and from a slow shared disk.")
    parser.add_argument("--parameters", type=float, default=58, help="of the model, in millions")
    parser.add_argument("--latency", type=float, default=10, help="of the shared disk, in ms")
    parser.add_argument("--rate", type=float, default=400, help="of the shared disk, in MB/s")
    parser.add_argument("--repeats", type=int, default=3)
    settings = parser.parse_args(arguments)
    checkpoint = cached_checkpoint("dense", settings.parameters * 2e-3)
    print(f"{checkpoint.nbytes / 2e6:.0f}M parameters\n{machine.in_words(machine.describe(checkpoint.folder))}")
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    losses = set()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as disks, tempfile.TemporaryDirectory() as folder:
        memory, shared = Path(folder, "memory"), Path(folder, "shared")
        memory.mkdir()

        def measured(what: str, hosts: str, place: Path) -> list[dict[str, Any]]:
            task = [what, hosts, str(checkpoint.folder), str(memory), disks, str(place)]
            return run(
                json.dumps(task), len(hosts), 900, module="benchmarks.hosts", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1"
            )

        ranks = measured("save", "abc", shared)
        waits, calls = (max(rank[key] for rank in ranks) for key in ("seconds", "call"))
        print(f"a save on three hosts, with a copy of each piece: {waits:.2f} s", flush=True)
        print(f"in the background, the call: {calls:.2f} s", flush=True)
        shutil.rmtree(Path(disks, "b"))
        for repeat in range(settings.repeats):
            for arm in Random(repeat).sample(ARMS, len(ARMS)):
                with slow_folder(shared, settings.latency, settings.rate) as place:  # a new mount: nothing is cached
                    ranks = measured(arm, "ac", place)
                losses.add(json.dumps([rank.pop("loss") for rank in ranks]))
                found[arm].append({key: max(rank[key] for rank in ranks) for key in ranks[0]})
    print("\n| state | load s | load and first step s (range) |\n|---|--:|--:|")
    for arm, runs in found.items():
        load, both = ([each[key] for each in runs] for key in ("load", "seconds"))
        print(f"| {arm} | {median(load):.2f} | {median(both):.2f} ({min(both):.2f} - {max(both):.2f}) |")
    part = [hosts["seconds"] / disk["seconds"] for hosts, disk in zip(*found.values(), strict=True)]
    print(f"\nhosts of shared: {median(part):.2f}; the same losses: {'yes' if len(losses) == 1 else 'NO'}")
    return 0 if len(losses) == 1 else 1


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("["):
        torch.set_num_threads(1)
        what, hosts, *places = json.loads(sys.argv[1])
        write_figures(sys.argv[2], measure(what, hosts[int(os.environ["RANK"])], *places))
    else:
        sys.exit(main())
