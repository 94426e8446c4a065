"""``hf-zero-stream plan --suggest``: the smallest set-up of ZeRO-3 that fits, and accelerate's config for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ...plugin_api import bytes_text, count_text, frame, share_reads_advice
from .needs import fit, needs_of_node, word_of_fit


ON_HOST = {"device": "cpu"}
OFFLOADS: Mapping[str, Mapping[str, Any]] = {
    "nothing": {},
    "optimizer": {"offload_optimizer": ON_HOST},
    "optimizer, parameters": {"offload_optimizer": ON_HOST, "offload_param": ON_HOST},
}
"""What goes to host memory, and what a DeepSpeed config says of it; each takes more time than the one before."""


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
) -> None:
    """Print what was looked at and what fits, and write accelerate's config for it; exit code 1 if nothing fits.

    `checkpoint` is that of :func:`...cli.checkpoints.loadable`; `how` has the arguments of
    :func:`hf_zero_stream.plan` that are the same for all set-ups. For `limits` see :class:`Machines`.
    """
    machines = Machines(most_ranks, ranks_per_node, limits)
    with checkpoint as (place, arguments):
        from .plan import plan

        def needs(ranks: int, config: Mapping[str, Any]) -> dict[str, int]:
            memory = plan(place, world_size=ranks, ds_config=config, **how, **arguments).memory
            return needs_of_node(memory, how["device"], min(machines.ranks_per_node, ranks))

        setup, looked_at = smallest(needs, machines, dtype)
        advice = share_reads_advice(place, -(-setup["ranks"] // ranks_per_node)) if setup else ""
    if write and setup:
        write_config(write, setup)
    data = {
        "path": path,
        **machines._asdict(),
        "device": how["device"],
        "looked_at": looked_at,
        "suggested": setup,
        "share_reads": advice,
        "written": str(write) if write and setup else None,
    }
    frame.emit(data, _blocks(data), form, ok=setup is not None)


def ds_config_of(offload: str, dtype: str) -> dict[str, Any]:
    """The DeepSpeed config of ZeRO-3 with this of :data:`OFFLOADS`, in `dtype`, as ``--dtype`` names it."""
    return frame.zero3_config({"zero_optimization": {"stage": 3, **OFFLOADS[offload]}}, dtype)


def smallest(
    needs: Callable[[int, Mapping[str, Any]], Mapping[str, int]], machines: Machines, dtype: str
) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """The first set-up that fits into the limits, or None, and all that were looked at.

    Least offload goes first, since that is fastest; then fewest ranks: 1, 2, 4, ... up to what there is.

    Args:
        needs: the bytes that a "device" and the "host" of a node need, by the number of ranks and a DeepSpeed config.
    """
    most = machines.most_ranks
    numbers = sorted({*(2**power for power in range(most.bit_length()) if 2**power < most), most})
    looked_at = []
    for offload in OFFLOADS:
        for ranks in numbers:
            found = needs(ranks, ds_config_of(offload, dtype))
            setup = {
                "ranks": ranks,
                "ranks_per_node": min(ranks, machines.ranks_per_node),
                "offload": offload,
                "dtype": dtype,
                "needs": {place: found[place] for place in ("device", "host")},
                "fits": fit(found, machines.limits),
            }
            looked_at.append(setup)
            if setup["fits"]:
                return setup, looked_at
    return None, looked_at


def write_config(path: Path, setup: Mapping[str, Any]) -> None:
    """Write what ``accelerate launch --config_file`` takes for `setup`."""
    import yaml

    offloaded = OFFLOADS[setup["offload"]]
    config = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "zero_stage": 3,
            "zero3_init_flag": True,
            "zero3_save_16bit_model": True,
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
    yield f"{data['path']}: ZeRO-3 with at most {count_text(data['most_ranks'], 'rank')}, {into}"
    rows = [
        (
            str(tried["ranks"]),
            tried["offload"],
            bytes_text(tried["needs"]["device"]),
            bytes_text(tried["needs"]["host"]),
            word_of_fit(tried["needs"], limits),
        )
        for tried in data["looked_at"]
    ]
    titles = (
        "ranks",
        "in host memory",
        f"a {data['device']} device needs",
        f"a node of {data['ranks_per_node']} needs",
        "fits",
    )
    yield frame.table(titles, rows, left=2)
    if setup is None:
        yield (
            "Nothing of this FITS. Give more ranks (--world-size), train adapters (--lora-rank), or offload to NVMe, "
            "which plan computes with --ds-config."
        )
        return
    yield (
        f"Smallest that fits: {count_text(setup['ranks'], 'rank')}, ZeRO-3 in {setup['dtype']}, in host memory: "
        f"{setup['offload']}. For activations, which are not counted, a device has "
        f"{bytes_text(limits['device'] - setup['needs']['device'])} left."
    )
    if data["share_reads"]:
        yield data["share_reads"]
    if written := data["written"]:
        yield f"Start it: hf-zero-stream run accelerate launch --config_file {written} train.py"
