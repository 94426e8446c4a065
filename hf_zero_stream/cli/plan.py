"""``hf-zero-stream plan``: what loading and training will take on each rank, and whether it fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ..reports.folding import fold
from .output import (
    CheckpointArgument,
    DequantizeOption,
    Format,
    FormatOption,
    RevisionOption,
    TrustOption,
    bytes_text,
    count_text,
    emit,
    quiet,
    size_option,
    table,
)
from .settings import Dtype, zero3_config


if TYPE_CHECKING:
    from ..footprint.memory import MemoryFootprint
    from ..loading.dry_load import Forecast
    from .stock import StockLoad

EXAMPLE = "hf-zero-stream plan Qwen/Qwen3-30B-A3B --world-size 64 --ds-config ds.json --device-memory 80GiB"

HOST = "cpu"
_PICTURES = (".png", ".svg", ".pdf")
_UNEVEN = 2.0
"""A shard of so many times the mean size is worth a word: storage that is striped by file reads it slower."""
_MUCH_MORE = 1.5
"""Reading so many times what is needed is."""


def run(
    path: CheckpointArgument,
    world_size: Annotated[int, typer.Option(min=1, help="Number of ranks.")],
    ds_config: Annotated[
        str | None, typer.Option(metavar="FILE", help="DeepSpeed config; default: ZeRO-3 with AdamW.")
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Dtype to train in, whatever the config says.")] = None,
    rank: Annotated[int, typer.Option(min=0, help="The rank to plan for; rank 0 has as much as any.")] = 0,
    device: Annotated[str, typer.Option(help="Type of the device that will train: cuda, cpu, ...")] = "cuda",
    device_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of a device; exit code 1 if it is too little.")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of a node; exit code 1 if it is too little.")
    ] = None,
    ranks_per_node: Annotated[int, typer.Option(min=1, help="Ranks that share a node's memory.")] = 8,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw who reads what, and memory by phase: .png, .svg or .pdf.")
    ] = None,
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    dequantize: DequantizeOption = False,
    form: FormatOption = Format.table,
) -> None:
    """Compute what a load under ZeRO-3 reads and what memory it and training need, beside stock's.

    Works for any world size on any machine: reads headers only, also from a repository on the Hub. Activations are
    not counted.
    """
    if rank >= world_size:
        raise typer.BadParameter(f"--rank: expected a rank below --world-size ({world_size}); got {rank}")
    limits = {
        "device": size_option("--device-memory", device_memory),
        "host": size_option("--host-memory", host_memory),
    }
    if device == HOST and limits["device"] is not None:
        raise typer.BadParameter("--device-memory: a CPU's memory is the host's; give --host-memory")
    config = zero3_config(ds_config, dtype) if ds_config or dtype else {}
    if plot is not None:
        _check_plot(plot)
    with quiet():
        forecast, stock, pictured = _forecasts(
            path, revision, trust_remote_code, dequantize, world_size, rank, config, device, plot is not None
        )
        if plot is not None:
            from .picture import draw

            draw(plot, pictured, device)
    plan, footprint = forecast.load, forecast.memory
    needs = _needs(footprint, device, min(ranks_per_node, world_size))
    fits = {place: needs[place] <= limit for place, limit in limits.items() if limit is not None}
    data = {
        "path": path,
        "world_size": world_size,
        "rank": rank,
        "device": device,
        "shards": len(plan.shards),
        "load": asdict(plan.cost),
        "memory": footprint.to_dict(),
        "needs": {**needs, "ranks_per_node": min(ranks_per_node, world_size)},
        "stock": stock and stock.to_dict(),
        "warnings": list(_warnings(forecast, config, ds_config is None)),
        "limits": {place: limit for place, limit in limits.items() if limit is not None},
        "fits": all(fits.values()) if fits else None,
    }
    emit(data, _blocks(data, footprint, stock), form)
    if not all(fits.values()):
        raise typer.Exit(1)


def _check_plot(path: Path) -> None:
    if find_spec("matplotlib") is None:
        raise typer.BadParameter("--plot: this needs matplotlib; pip install 'hf_zero_stream[plot]'")
    if path.suffix not in _PICTURES:
        raise typer.BadParameter(f"--plot: expected a name that ends in one of {', '.join(_PICTURES)}; got {path}")
    if not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"--plot: there is no folder {path.parent}")


def _forecasts(
    path: str,
    revision: str | None,
    trust_remote_code: bool,
    dequantize: bool,
    world_size: int,
    rank: int,
    config: Mapping[str, Any],
    device: str,
    is_pictured: bool,
) -> tuple[Forecast, StockLoad | None, list[Forecast]]:
    """The forecast of the rank that was asked for, stock's figures, and those of the ranks that a picture shows."""
    from ..checkpoint.soundness import shards_of
    from ..loading.dry_load import plan
    from .checkpoints import headers
    from .shapes import load_arguments, model_shapes, quantisation, transformers_errors
    from .stock import stock_load

    with headers(path, revision) as folder, transformers_errors(path):
        shards_of(folder)  # raises if there are none: what is pickled is not opened
        arguments = load_arguments(folder, trust_remote_code, dequantize)

        def forecast_of(number: int) -> Forecast:
            return plan(
                str(folder), world_size=world_size, rank=number, ds_config=config or None, device=device, **arguments
            )

        forecast = forecast_of(rank)
        # Stock loads what is quantised in another way: every rank all of it.
        stock = None
        if quantisation(folder) is None:
            stock = stock_load(forecast, model_shapes(folder, arguments).parameters, device)
        pictured: list[Forecast] = []
        if is_pictured:
            from .picture import ranks_to_draw

            pictured = [
                forecast if number == rank else forecast_of(number) for number in ranks_to_draw(world_size, rank)
            ]
    return forecast, stock, pictured


def _needs(footprint: MemoryFootprint, device: str, ranks_per_node: int) -> dict[str, int]:
    """Bytes that a device, and the host of a node with so many ranks, must have at least, activations apart."""
    training = Counter(footprint.held) + Counter({device: footprint.largest_gather})
    most = {
        place: max(phase.get(place, 0) for phase in (footprint.load_peak, footprint.start_peak, training))
        for place in {device, HOST}
    }
    return {"device": 0 if device == HOST else most[device], "host": most[HOST] * ranks_per_node}


def _warnings(forecast: Forecast, config: Mapping[str, Any], defaults: bool) -> Iterator[str]:
    import torch

    from ..destinations.deepspeed.zero3 import partition_dtype, undecided

    plan, footprint = forecast.load, forecast.memory
    partitions = sum(footprint.partitions.values())
    if footprint.largest_gather > partitions:
        yield (
            f"Largest gather: the forward pass gathers {footprint.largest_gather_of} whole on every rank, "
            f"{bytes_text(footprint.largest_gather)}: more than a rank's partitions, and no world size lowers it."
        )
    sizes = [shard.size_bytes for shard in plan.shards]
    if max(sizes) > _UNEVEN * sum(sizes) / len(sizes):
        largest = max(plan.shards, key=lambda shard: shard.size_bytes)
        yield (
            f"Uneven shards: {Path(largest.path).name} has {bytes_text(largest.size_bytes)} of "
            f"{bytes_text(sum(sizes))} in {len(sizes)} shards."
        )
    if plan.cost.bytes_read > _MUCH_MORE * plan.cost.bytes_needed:
        yield (
            f"Reads more than it needs: {bytes_text(plan.cost.bytes_read)} for "
            f"{bytes_text(plan.cost.bytes_needed)}, because layouts differ or ranks are many."
        )
    for reason in dict.fromkeys(plan.materialised.values()):
        names = [
            family.name for family in fold((name, ()) for name, why in plan.materialised.items() if why == reason)
        ]
        yield f"Materialised parameters, whose sources are read whole ({reason}): {', '.join(names)}"
    if defaults:
        yield "No --ds-config: ZeRO-3 with DeepSpeed's defaults, no offload, and AdamW are assumed."
    auto = undecided(config)
    if auto:
        yield f'"{auto[0]}.enabled" is "auto": counted as off; say --dtype {auto[0]} if that is what it becomes.'
    elif config and partition_dtype(config) == torch.float32:
        yield "Parameters are in fp32, because the DeepSpeed config enables neither bf16 nor fp16."


def _blocks(data: Mapping[str, Any], footprint: MemoryFootprint, stock: StockLoad | None) -> Iterator[Table | str]:
    load, needs = data["load"], data["needs"]
    yield f"Rank {data['rank']} of {data['world_size']}: {data['path']}, {count_text(data['shards'], 'shard')}"
    rows: list[tuple[str, ...]] = [
        ("reads from files", f"{bytes_text(load['bytes_read'])} in {count_text(load['reads'], 'read')}"),
        ("of these needed", bytes_text(load["bytes_needed"])),
        ("spans of files", f"{load['seeks']:,}"),
        ("receives as whole parameters", "nothing"),
        ("partitions", _places(footprint.partitions)),
        ("staging", f"up to {bytes_text(footprint.staging)}"),
        ("files mapped into memory", "nothing"),
        ("peak of the load", _places(footprint.load_peak)),
    ]
    titles = ["Load", "streaming"]
    if stock is not None:
        read, same = bytes_text(stock.rank0_read), _places(footprint.partitions)
        titles += ["stock, rank 0", "stock, others"]
        first = (read, "", "", "nothing", same, "", read, _places(stock.rank0_peak))
        others = ("headers", "", "", bytes_text(stock.other_received), same, "", "headers", _places(stock.other_peak))
        rows = [(*row, *columns) for row, *columns in zip(rows, first, others, strict=True)]
    yield table(titles, rows)

    started = {
        "fp32 copies": footprint.master,
        "gradients": footprint.gradients,
        "reduce bucket": footprint.reduce_bucket,
        "hpZ copies": footprint.secondary,
    }
    rows_of_training = [
        *((f"deepspeed.initialize adds {what}", _places(places)) for what, places in started.items() if places),
        ("deepspeed.initialize peaks at", _places(footprint.start_peak)),
        ("the first step adds optimizer states", _places(footprint.optimizer_states) or "nothing"),
        ("held between steps", _places(footprint.held)),
        ("largest gather of the forward pass", bytes_text(footprint.largest_gather)),
        ("gathered for", footprint.largest_gather_of),
    ]
    yield table(("Training", "streaming" if stock is None else "streaming and stock"), rows_of_training)
    if data["warnings"]:
        yield "\n".join(f"Warning: {warning}" for warning in data["warnings"])
    yield "\n".join(_verdict(needs, data["limits"], data["device"]))


def _verdict(needs: Mapping[str, int], limits: Mapping[str, int], device: str) -> Iterator[str]:
    places = {
        "device": f"A {device} device",
        "host": f"The host of a node with {count_text(needs['ranks_per_node'], 'rank')}",
    }
    for place, name in places.items():
        if place == "device" and device == HOST:
            continue
        line = f"{name} needs {bytes_text(needs[place])} or more, activations not counted"
        if place in limits:
            verdict = "fits" if needs[place] <= limits[place] else "DOES NOT FIT"
            line += f": {verdict} into {bytes_text(limits[place])}"
        yield f"{line}."


def _places(places: Mapping[str, int]) -> str:
    """Bytes by place, the device's first."""
    ordered = sorted(places, key=lambda place: (place == HOST, place))
    return " + ".join(f"{bytes_text(places[place])} {place}" for place in ordered if places[place])
