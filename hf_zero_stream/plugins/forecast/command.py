"""``hf-zero-stream plan``: what loading and training will take on each rank, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ...plugin_api import bytes_text, count_text, folded_names, frame, loadable
from . import wire
from .needs import HOST, fit, needs_of_node, verdict
from .worlds import WORLDS, show_worlds


if TYPE_CHECKING:
    from .footprint import MemoryFootprint
    from .plan import Forecast

EXAMPLE = "hf-zero-stream plan Qwen/Qwen3-30B-A3B --world-size 64 --ds-config ds.json --device-memory 80GiB"

MOST_RANKS = 8
MOST_BARS = 64
_UNEVEN = 2.0
"""Warn of a shard this many times the mean size: storage that is striped by file reads it slower."""
_MUCH_MORE = 1.5
"""Warn of reading this many times the bytes that are needed."""


def _memory_option(of: str) -> Any:
    return typer.Option(metavar="SIZE", parser=frame.size, help=f"Memory of a {of}; exit code 1 if it is too little.")


def _size_option(what: str) -> Any:
    return typer.Option(min=1, help=f"Number of ranks {what}; in place of ZeRO-3.")


def run(
    path: frame.CheckpointArgument,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks; default: those of --fsdp, --tp, ..., or 1 to 64.")
    ] = None,
    ds_config: Annotated[dict[str, Any] | None, frame.ds_config_option(1, 2, 3)] = None,
    dtype: frame.DtypeOption = None,
    fsdp: Annotated[int | None, _size_option("that FSDP2 shards over")] = None,
    tp: Annotated[int | None, _size_option("of tensor parallelism")] = None,
    ep: Annotated[int | None, _size_option("of expert parallelism, out of those of --fsdp and --tp")] = None,
    replicate: Annotated[int | None, _size_option("that hold the same shards (HSDP)")] = None,
    rank: Annotated[int, typer.Option(min=0, help="The rank to plan for; rank 0 has as much as any.")] = 0,
    device: Annotated[str, typer.Option(help="Type of the device that will train: cuda, cpu, ...")] = "cuda",
    adamw: Annotated[
        Literal["single", "foreach", "fused"] | None,
        typer.Option(help="How torch's AdamW steps, if the config leaves it open; default: torch's choice."),
    ] = None,
    lora_rank: Annotated[
        int | None, typer.Option(min=1, help="Rank of LoRA adapters, which are trained alone; needs --lora-targets.")
    ] = None,
    lora_targets: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Modules that get an adapter: q_proj,o_proj or all-linear.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a micro-batch on a rank: their activations are estimated.")
    ] = None,
    link_gbps: Annotated[
        float | None,
        typer.Option(metavar="GBIT", min=0.001, help="Gigabits a second of a rank's link: how long a step sends."),
    ] = None,
    disk_gbps: Annotated[
        float | None,
        typer.Option(
            metavar="GBYTE", min=0.001, help="Gigabytes a second of a node's disks: how long a step reads files."
        ),
    ] = None,
    device_memory: Annotated[int | None, _memory_option("device")] = None,
    host_memory: Annotated[int | None, _memory_option("node")] = None,
    ranks_per_node: Annotated[int, typer.Option(min=1, help="Ranks that share a node's memory.")] = 8,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=frame.file_to_write(".png", ".svg", ".pdf", draws=True),
            help="Draw who reads what, and the memory of ranks: .png, .svg or .pdf.",
        ),
    ] = None,
    html: frame.PageOption = None,
    suggested: Annotated[
        bool,
        typer.Option(
            "--suggest",
            help="Find the first set-up that fits; --world-size is the most ranks (64).",
        ),
    ] = False,
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=frame.file_to_write(".yaml", ".yml"),
            help="Write accelerate's config for what --suggest finds: .yaml.",
        ),
    ] = None,
    revision: frame.RevisionOption = None,
    trust_remote_code: frame.TrustOption = False,
    dequantize: frame.DequantizeOption = False,
    form: frame.FormatOption = "table",
) -> None:
    """Compute what a load reads, and what memory it and training need.

    Shows the same of stock's load; without a number of ranks, a line for each of 1 to 64. Without --fsdp, --tp, --ep
    or --replicate the load is under ZeRO-3; with one of them, it is that of transformers' distributed_config. Works
    for any number of ranks on any machine: it reads headers only, also from a repository on the Hub. Activations are
    counted with --tokens.
    """
    sharding, world_size = _sharding(world_size, fsdp=fsdp, tp=tp, ep=ep, replicate=replicate)
    if world_size is None and (rank or plot or html):
        raise typer.BadParameter("--world-size: expected the number of ranks, for --rank, --plot and --html; got none")
    if link_gbps is not None and (suggested or world_size is None):
        raise typer.BadParameter("--link-gbps: expected --world-size, and no --suggest; it is for one set-up")
    if disk_gbps is not None and not suggested and world_size is None:
        raise typer.BadParameter("--disk-gbps: expected --world-size or --suggest; it is for one set-up")
    if world_size is not None and rank >= world_size:
        raise typer.BadParameter(f"--rank: expected a rank below --world-size ({world_size}); got {rank}")
    if device == HOST and device_memory is not None:
        raise typer.BadParameter("--device-memory: a CPU's memory is the host's; give --host-memory")
    if sharding and ds_config is not None:
        raise typer.BadParameter("--ds-config: expected ZeRO-3 alone; got --fsdp, --tp, --ep or --replicate too")
    lora = _lora(lora_rank, lora_targets)
    if lora is not None and sharding.keys() - {"fsdp_size"}:
        raise typer.BadParameter("--lora-rank: expected ZeRO-3, or --fsdp alone; got --tp, --ep or --replicate")
    if suggested and device == HOST:
        raise typer.BadParameter("--suggest: expected a GPU's --device-memory; a CPU has nothing to offload to")
    if suggested and (sharding or ds_config or device_memory is None):
        raise typer.BadParameter("--suggest: expected --device-memory, and neither --ds-config nor --fsdp, --tp, ...")
    if write and not suggested:
        raise typer.BadParameter("--write: expected --suggest, which finds what is written")
    given = {"device": device_memory, "host": host_memory}
    limits = {place: limit for place, limit in given.items() if limit is not None}
    checkpoint = loadable(path, revision, trust_remote_code=trust_remote_code, dequantize=dequantize)
    how: dict[str, Any] = {"device": device, "adamw": adamw, "lora": lora, "tokens": tokens}
    if suggested:
        from .suggest import suggest

        most = world_size or WORLDS[-1]
        suggest(path, checkpoint, how, most, ranks_per_node, limits, dtype or "bf16", write, form, disk_gbps)
        return
    config = frame.config_with_dtype(ds_config, dtype) if not sharding and (ds_config or dtype) else {}
    if world_size is None:
        show_worlds(path, checkpoint, {**how, "ds_config": config or None}, ranks_per_node, limits, form)
        return
    most = MOST_BARS if html else MOST_RANKS if plot else 1
    ranks = ranks_to_draw(world_size, rank, most)
    with checkpoint as (place, arguments):
        from .footprint import FILES
        from .plan import plan
        from .stock import stock_load

        how |= {"world_size": world_size, "ds_config": config or None, **arguments}
        if sharding:
            how |= {"distributed_config": sharding, "dtype": dtype}
        forecasts = {number: plan(place, rank=number, **how) for number in ranks}
        forecast = forecasts[rank]
        is_stage_3 = not sharding and forecast.memory.stage == 3
        stock = stock_load(forecast, place, arguments, device) if is_stage_3 else None
    needs = needs_of_node(forecast.memory, device, min(ranks_per_node, world_size), forecast.activations)
    sent = sum(forecast.wire.values())
    read = 2 * forecast.memory.partitions.get(FILES, 0)  # forward, and backward
    fits = fit(needs, limits)
    data = {
        "path": path,
        "world_size": world_size,
        "rank": rank,
        "sharding": sharding,
        "device": device,
        "shards": len(forecast.load.shards),
        "load": forecast.load.cost._asdict(),
        "memory": asdict(forecast.memory),
        "wire": forecast.wire,
        "wire_seconds": link_gbps and wire.seconds(sent, link_gbps),
        "step_reads": read,
        "step_reads_seconds": disk_gbps and read * min(ranks_per_node, world_size) / (disk_gbps * 1e9),
        "tokens": tokens,
        "activations": forecast.activations,
        "needs": needs,
        "stock": stock,
        "warnings": list(_warnings(forecast, config, ds_config is None and not sharding)),
        "limits": limits,
        "fits": fits if limits else None,
    }
    if plot or html:
        on_rank = {HOST: host_memory and host_memory // min(ranks_per_node, world_size), device: device_memory}
        drawn = [forecast, *(forecasts[number] for number in ranks if number != rank)]
        shown = drawn, device, {place: limit for place, limit in on_rank.items() if limit}
        from .picture import as_svg, draw

        if plot:
            draw(plot, *shown)
        if html:
            from ...plugin_api import write_page

            title, blocks = f"{path}: {count_text(world_size, 'rank')}", list(_blocks(data, forecast.memory))
            note = "All memory is computed before anything is loaded. The picture has no activations."
            write_page(html, title, as_svg(*shown), note, blocks)
    frame.emit(data, _blocks(data, forecast.memory), form, ok=fits)


def _lora(rank: int | None, targets: str | None) -> dict[str, Any] | None:
    if (rank is None) != (targets is None):
        raise typer.BadParameter("expected both or neither of --lora-rank and --lora-targets; got one")
    if rank is None or targets is None:
        return None
    names = [name.strip() for name in targets.split(",")]
    return {"r": rank, "target_modules": names[0] if names == ["all-linear"] else names}


def _sharding(world_size: int | None, **sizes: int | None) -> tuple[dict[str, int], int | None]:
    """(the fields of a DistributedConfig for these options, empty without any; the number of ranks, if given)."""
    names = {"fsdp": "fsdp_size", "tp": "tp_size", "ep": "ep_size", "replicate": "dp_replicate_size"}
    given = {names[option]: size for option, size in sizes.items() if size is not None}
    if not given:
        return given, world_size
    ranks = prod(size for name, size in given.items() if name != "ep_size")
    if world_size not in (None, ranks):
        raise typer.BadParameter(
            f"--world-size: expected {ranks}, which is --replicate * --fsdp * --tp; got {world_size}"
        )
    return given, ranks


def ranks_to_draw(world_size: int, rank: int, most: int = MOST_RANKS) -> list[int]:
    """`rank` and others, evenly spaced; at most `most`, because planning for each takes seconds."""
    count = min(world_size, most)
    return sorted((rank + round(number * world_size / count)) % world_size for number in range(count))


def _warnings(forecast: Forecast, config: Mapping[str, Any], defaults: bool) -> Iterator[str]:
    plan, footprint = forecast.load, forecast.memory
    if footprint.largest_gather > sum(footprint.partitions.values()):
        yield (
            f"Largest gather: the forward pass gathers {footprint.largest_gather_of} whole on every rank, "
            f"{bytes_text(footprint.largest_gather)}: more than a rank's partitions, and no world size lowers it."
        )
    total, largest = sum(shard.size_bytes for shard in plan.shards), max(plan.shards, key=lambda it: it.size_bytes)
    if largest.size_bytes > _UNEVEN * total / len(plan.shards):
        yield (
            f"Uneven shards: {Path(largest.path).name} has {bytes_text(largest.size_bytes)} of "
            f"{bytes_text(total)} in {len(plan.shards)} shards."
        )
    if plan.cost.bytes_read > _MUCH_MORE * plan.cost.bytes_needed:
        yield (
            f"Reads more than it needs: {bytes_text(plan.cost.bytes_read)} for "
            f"{bytes_text(plan.cost.bytes_needed)}, because layouts differ or ranks are many."
        )
    for reason in dict.fromkeys(plan.materialised.values()):
        names = folded_names(name for name, why in plan.materialised.items() if why == reason)
        yield f"Materialised parameters, whose sources are read whole ({reason}): {', '.join(names)}"
    if footprint.stage < 3 and not footprint.staging:
        yield (
            'Each rank reads the whole checkpoint, as in stock. With "hf_zero_stream": {"share_reads": true} in '
            "--ds-config each reads a part of it."
        )
    if "files" in footprint.partitions:
        yield "Frozen weights stay in files: what is to be read is read twice in each step, and not by the load."
    if defaults:
        yield "No --ds-config: ZeRO-3 with DeepSpeed's defaults, no offload, and AdamW are assumed."
    if not config:
        return
    import torch

    from ...plugin_api import zero3  # FSDP2 needs no DeepSpeed

    auto = zero3.undecided(config)
    if auto:
        yield f'"{auto[0]}.enabled" is "auto": counted as off; say --dtype {auto[0]} if that is what it becomes.'
    elif zero3.partition_dtype(config) == torch.float32:
        yield "Parameters are in fp32, because the DeepSpeed config enables neither bf16 nor fp16."


def _blocks(data: Mapping[str, Any], memory: MemoryFootprint) -> Iterator[str]:
    load, stock, warnings = data["load"], data["stock"], data["warnings"]
    sharding = "".join(f", {name} {size}" for name, size in data["sharding"].items())
    ranks = f"Rank {data['rank']} of {data['world_size']}{sharding}"
    yield f"{ranks}: {data['path']}, {count_text(data['shards'], 'shard')}"
    reads_alone = memory.stage < 3 and not memory.staging
    titles = ["Load", "as in stock" if reads_alone else "streaming"]
    partitions = _by_place(memory.holds, memory.partitions)
    peaks = _by_place("peak", memory.load_peak)
    rows = [
        ["read from files", bytes_text(load["bytes_read"])],
        ["needed", bytes_text(load["bytes_needed"])],
        ["reads", f"{load['reads']:,}"],
        ["contiguous ranges", f"{load['seeks']:,}"],
        ["received", "nothing"],
        *([name, text] for name, text in partitions.items()),
        ["staging buffers", bytes_text(memory.staging)],
        ["mapped files", "nothing"],
        *([name, text] for name, text in peaks.items()),
    ]
    if stock is not None:
        read, received = bytes_text(stock["rank0_read"]), bytes_text(stock["other_received"])
        titles += ["stock, rank 0", "stock, others"]
        first = {"read from files": read, "received": "nothing", **partitions, "mapped files": read}
        others = {"read from files": "headers", "received": received, **partitions, "mapped files": "headers"}
        columns = first | _by_place("peak", stock["rank0_peak"]), others | _by_place("peak", stock["other_peak"])
        rows = [[name, text, *(column.get(name, "") for column in columns)] for name, text in rows]
    yield frame.table(titles, rows)
    if memory.engine == "deepspeed":
        starts = [[f"deepspeed.initialize adds {what}", _places(places)] for what, places in memory.started.items()]
        starts.append(["deepspeed.initialize peaks at", _places(memory.start_peak)])
    else:
        starts = []
    starts += [[f"the first backward pass adds {what}", _places(it)] for what, it in memory.first_backward.items()]
    saved = memory.partitions, memory.master, memory.optimizer_states
    gathers = [
        ["largest gather of the forward pass", bytes_text(memory.largest_gather)],
        ["gathered at once", memory.largest_gather_of or "nothing"],
        ["most that may be gathered", bytes_text(memory.most_gathered)],
    ]
    state = ["a state of this rank (save_state)", bytes_text(sum(sum(places.values()) for places in saved))]
    rows = [
        *starts,
        ["the first step adds optimizer states", _places(memory.optimizer_states) or "nothing"],
        ["held between steps", _places(memory.held)],
        *(gathers if memory.largest_gather else []),
        ["passes through the model peak at", _places(memory.passes_peak)],
        *([f"activations, {how} (estimate)", bytes_text(nbytes)] for how, nbytes in data["activations"].items()),
        ["a step of the optimizer peaks at", _places(memory.step_peak)],
        *([f"... with {cure}", _places(places)] for cure, places in memory.step_cures.items()),
        *([state] if memory.stage == 3 else []),
        *([f"a step sends {what}", bytes_text(nbytes)] for what, nbytes in data["wire"].items() if nbytes),
    ]
    if data["wire_seconds"]:
        rows.append(["... over the link, at least", f"{data['wire_seconds']:.3g} s"])
    if data["step_reads"]:
        rows.append(["a step reads of files, at most", bytes_text(data["step_reads"])])
    if data["step_reads_seconds"]:
        rows.append(["... from the node's disks, at least", f"{data['step_reads_seconds']:.3g} s"])
    is_both = stock is not None or data["sharding"]
    yield frame.table(("Training", "streaming and stock" if is_both else "streaming"), rows)
    if warnings:
        yield "\n".join(f"Warning: {warning}" for warning in warnings)
    yield "\n".join(verdict(data["needs"], data["limits"], data["device"], data["tokens"]))


def _by_place(name: str, places: Mapping[str, int]) -> dict[str, str]:
    """A row of a table for each place, the host's last."""
    return {f"{name}, {place}": bytes_text(places[place]) for place in _ordered(places)}


def _places(places: Mapping[str, int]) -> str:
    return " + ".join(f"{bytes_text(places[place])} {place}" for place in _ordered(places))


def _ordered(places: Mapping[str, int]) -> list[str]:
    return sorted((place for place in places if places[place]), key=lambda place: (place == HOST, place))
