"""``hf-zero-stream plan`` without ``--world-size``: what a model needs on 1 to 64 ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

from ...plugin_api import bytes_text, count_text, frame
from .needs import HOST, fit, needs_of_node, word_of_fit


WORLDS = (1, 2, 4, 8, 16, 32, 64)


def show_worlds(
    path: str,
    checkpoint: AbstractContextManager[tuple[str, dict[str, Any]]],
    how: Mapping[str, Any],
    ranks_per_node: int,
    limits: Mapping[str, int],
    form: Literal["table", "json"],
) -> None:
    """Print what the ranks of each of :data:`WORLDS` read and need; exit code 1 if it fits into `limits` in none.

    `checkpoint` is that of :func:`...cli.checkpoints.loadable`; `how` has the arguments of :func:`.plan.plan` that are
    the same for all. `limits` has the bytes of a "device" and of a node's "host", or less than that.
    """
    worlds = []
    with checkpoint as (place, arguments):
        from .plan import plan

        for ranks in WORLDS:
            forecast = plan(place, world_size=ranks, **how, **arguments)
            needs = needs_of_node(forecast.memory, how["device"], min(ranks_per_node, ranks), forecast.activations)
            fits = fit(needs, limits) if limits else None
            worlds.append({"world_size": ranks, "read": forecast.load.cost.bytes_read, "needs": needs, "fits": fits})
    fits = any(world["fits"] for world in worlds) if limits else None
    data = {
        "path": path,
        "device": how["device"],
        "tokens": how["tokens"],
        "worlds": worlds,
        "limits": limits,
        "fits": fits,
    }
    frame.emit(data, _blocks(data, ranks_per_node), form, ok=fits is not False)


def _blocks(data: Mapping[str, Any], ranks_per_node: int) -> Iterator[str]:
    device, limits = data["device"], data["limits"]
    tokens = data["tokens"]
    counted = f"with activations of {count_text(tokens, 'token')}" if tokens else "activations not counted"
    yield f"{data['path']}: what one rank reads, and the memory that training needs, {counted}"
    devices = () if device == HOST else (f"a {device} device",)
    rows = []
    for world in data["worlds"]:
        needs = world["needs"]
        sizes = [bytes_text(size) for size in (world["read"], *([needs["device"]] if devices else []), needs["host"])]
        rows.append([str(world["world_size"]), *sizes, *([word_of_fit(needs, limits)] if limits else [])])
    yield frame.table(
        ("ranks", "a rank reads", *devices, f"a node of {ranks_per_node}", *(["fits"] if limits else [])), rows
    )
    yield "plan --world-size N shows one of them in full; --suggest finds the smallest that fits a --device-memory."
