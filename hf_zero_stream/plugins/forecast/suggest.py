"""``hf-zero-stream plan --suggest``: the first set-up of ZeRO that fits, and accelerate's config for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ...plugin_api import bytes_text, count_text, frame, has_tool, is_url, share_reads_advice
from .footprint import FILES
from .needs import fit, needs_of_node, word_of_fit


ON_HOST = {"device": "cpu"}
OFFLOADS: Mapping[str, Mapping[str, Any]] = {
    "nothing": {},
    "optimizer": {"offload_optimizer": ON_HOST},
    "optimizer, parameters": {"offload_optimizer": ON_HOST, "offload_param": ON_HOST},
}
"""What goes to host memory, and what a DeepSpeed config says of it; each takes more time than the one before."""

RUNGS = ((1, "nothing"), (2, "nothing"), *((3, offload) for offload in OFFLOADS))
"""Stages of ZeRO and what goes to host memory with them, from the fastest on: stage 3 sends more than the others."""

IN_FILES = "nothing; frozen weights in files"
"""The last resort for adapters: each step reads what does not change."""


class Machines(NamedTuple):
    """The machines that there are to train on."""

    most_ranks: int
    ranks_per_node: int
    limits: Mapping[str, int]
    """Bytes of a "device", and of the "host" of a node if that is limited."""


def suggest(
    path: str,
    checkpoint: AbstractContextManager[tuple[str, dict[str, Any]]],
    how: Mapping[str, Any],
    most_ranks: int,
    ranks_per_node: int,
    limits: Mapping[str, int],
    dtype: str,
    write: Path | None,
    form: Literal["table", "json"],
    disk_gbps: float | None = None,
) -> None:
    """Print what was looked at and what fits, and write accelerate's config for it; exit code 1 if nothing fits.

    `checkpoint` is that of :func:`...cli.checkpoints.loadable`; `how` has the arguments of
    :func:`hf_zero_stream.plan` that are the same for all set-ups. For `limits` see :class:`Machines`.
    """
    machines = Machines(most_ranks, ranks_per_node, limits)
    with checkpoint as (place, arguments):
        from .plan import plan

        def needs(ranks: int, config: Mapping[str, Any]) -> dict[str, int]:
            found = plan(place, world_size=ranks, ds_config=config, **how, **arguments)
            ranks_of_node = min(machines.ranks_per_node, ranks)
            needed = needs_of_node(found.memory, how["device"], ranks_of_node, found.activations)
            return {**needed, "step_reads": 2 * found.memory.partitions.get(FILES, 0) * ranks_of_node}

        may_stay = how["lora"] is not None and has_tool("file_swapper") and not is_url(place)
        rungs = (*RUNGS, (3, IN_FILES)) if may_stay else RUNGS
        setup, looked_at = smallest(needs, machines, dtype, rungs)
        advice = share_reads_advice(place, -(-setup["ranks"] // ranks_per_node)) if setup else ""
    if write and setup:
        write_config(write, setup)
    data = {
        "path": path,
        **machines._asdict(),
        "device": how["device"],
        "tokens": how["tokens"],
        "looked_at": looked_at,
        "suggested": setup,
        "disk_gbps": disk_gbps,
        "share_reads": advice,
        "written": str(write) if write and setup else None,
    }
    frame.emit(data, _blocks(data), form, ok=setup is not None)


def ds_config_of(stage: int, offload: str, dtype: str) -> dict[str, Any]:
    """The DeepSpeed config of a stage with this of :data:`OFFLOADS`, in `dtype`, as ``--dtype`` names it."""
    in_files = {"hf_zero_stream": {"frozen_weights": "files"}} if offload == IN_FILES else {}
    zero = {"stage": stage, **OFFLOADS.get(offload, {})}
    return frame.config_with_dtype({"zero_optimization": zero, **in_files}, dtype)


def smallest(
    needs: Callable[[int, Mapping[str, Any]], Mapping[str, int]],
    machines: Machines,
    dtype: str,
    rungs: Sequence[tuple[int, str]] = RUNGS,
) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """The first set-up that fits into the limits, or None, and all that were looked at.

    The order is that of `rungs`; of each, fewest ranks go first: 1, 2, 4, ... up to what there is. If a device
    has too little memory with most ranks, it has with fewer, too.

    Args:
        needs: the bytes that a "device" and the "host" of a node need, by the number of ranks and a DeepSpeed config;
            and what a node reads of files in a step ("step_reads").
    """
    most = machines.most_ranks
    numbers = sorted({*(2**power for power in range(most.bit_length()) if 2**power < most), most})
    looked_at = []
    for stage, offload in rungs:

        def look(ranks: int, stage: int = stage, offload: str = offload) -> dict[str, Any]:
            found = needs(ranks, ds_config_of(stage, offload, dtype))
            return {
                "ranks": ranks,
                "ranks_per_node": min(ranks, machines.ranks_per_node),
                "stage": stage,
                "offload": offload,
                "dtype": dtype,
                "needs": {place: found[place] for place in ("device", "host")},
                "step_reads": found.get("step_reads", 0),
                "fits": fit(found, machines.limits),
            }

        with_most = look(most)
        if with_most["needs"]["device"] > machines.limits["device"]:
            looked_at.append(with_most)
            continue
        for ranks in numbers:
            looked_at.append(with_most if ranks == most else look(ranks))
            if looked_at[-1]["fits"]:
                return looked_at[-1], looked_at
    return None, looked_at


def write_config(path: Path, setup: Mapping[str, Any]) -> None:
    """Write what ``accelerate launch --config_file`` takes for `setup`."""
    import yaml

    offloaded = OFFLOADS.get(setup["offload"], {})
    config = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "zero_stage": setup["stage"],
            "zero3_init_flag": setup["stage"] == 3,
            "zero3_save_16bit_model": setup["stage"] == 3,
            "offload_param_device": "cpu" if "offload_param" in offloaded else "none",
            "offload_optimizer_device": "cpu" if "offload_optimizer" in offloaded else "none",
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
        },
        "mixed_precision": {"fp32": "no"}.get(setup["dtype"], setup["dtype"]),
        "num_machines": -(-setup["ranks"] // setup["ranks_per_node"]),
        "machine_rank": 0,
        "num_processes": setup["ranks"],
        "main_training_function": "main",
    }
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")


def _blocks(data: Mapping[str, Any]) -> Iterator[str]:
    limits, setup = data["limits"], data["suggested"]
    into = " and ".join(f"{bytes_text(limit)} of {place} memory" for place, limit in limits.items())
    yield f"{data['path']}: ZeRO with at most {count_text(data['most_ranks'], 'rank')}, {into}"
    rows = [
        (
            str(tried["stage"]),
            str(tried["ranks"]),
            tried["offload"],
            bytes_text(tried["needs"]["device"]),
            bytes_text(tried["needs"]["host"]),
            word_of_fit(tried["needs"], limits),
        )
        for tried in data["looked_at"]
    ]
    titles = (
        "stage",
        "ranks",
        "in host memory",
        f"a {data['device']} device needs",
        f"a node of {data['ranks_per_node']} needs",
        "fits",
    )
    yield frame.table(titles, rows, left=3)
    if setup is None:
        yield (
            "Nothing of this FITS. Give more ranks (--world-size), train adapters (--lora-rank), or offload to NVMe, "
            "which plan computes with --ds-config."
        )
        return
    room = bytes_text(limits["device"] - setup["needs"]["device"])
    left = f"For activations, which are not counted, a device has {room} left."
    if data["tokens"]:
        left = f"With checkpointed activations of {count_text(data['tokens'], 'token')}, a device has {room} left."
    yield (
        f"First that fits: {count_text(setup['ranks'], 'rank')}, stage {setup['stage']} in {setup['dtype']}, in host "
        f"memory: {setup['offload']}. {left}"
    )
    variable = ""
    if setup["offload"] == IN_FILES:
        variable, reads, speed = "HF_ZERO_STREAM_FROZEN_WEIGHTS=files ", setup["step_reads"], data["disk_gbps"]
        seconds = f": {reads / speed / 1e9:.1f} s at least" if speed else ""
        yield f"A node reads at most {bytes_text(reads)} of files in a step{seconds}. Set {variable.strip()}."
    if data["share_reads"]:
        yield data["share_reads"]
    if written := data["written"]:
        yield f"Start it: {variable}hf-zero-stream run accelerate launch --config_file {written} train.py"
