"""The memory that training needs on a device and on a host, whether there is as much, and when to share reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ...plugin_api import bytes_text, count_text


if TYPE_CHECKING:
    from .footprint import MemoryFootprint

HOST = "cpu"

_TIGHT = 0.8
"""A device of which more is needed than this share, before activations, is tight."""


def phases_of(footprint: MemoryFootprint) -> tuple[Mapping[str, int], ...]:
    """Bytes by place in the load, the engine's start, the passes through the model and the optimizer's step."""
    return footprint.load_peak, footprint.start_peak, footprint.passes_peak, footprint.step_peak


def needs_of_node(
    footprint: MemoryFootprint, device: str, ranks_per_node: int, activations: Mapping[str, int] | None = None
) -> dict[str, int]:
    """The memory that a device and the host of a node with `ranks_per_node` ranks need.

    `activations` are those of :class:`.plan.Forecast`, of which the checkpointed ones count.
    """
    load, start, passes, step = phases_of(footprint)
    passes = Counter(passes) + Counter({device: (activations or {}).get("checkpointed", 0)})
    phases = load, start, passes, step
    most = {place: max(phase.get(place, 0) for phase in phases) for place in {device, HOST}}
    return {
        "device": 0 if device == HOST else most[device],
        "host": most[HOST] * ranks_per_node,
        "ranks_per_node": ranks_per_node,
    }


def fit(needs: Mapping[str, int], limits: Mapping[str, int]) -> bool:
    """Whether nothing is needed that is not there; what has no limit does not count."""
    return all(needs[place] <= limit for place, limit in limits.items())


def is_tight(need: int, limit: int) -> bool:
    """Whether a device, of which activations take their part too, has little room for them."""
    return _TIGHT * limit < need <= limit


def word_of_fit(needs: Mapping[str, int], limits: Mapping[str, int]) -> str:
    """The verdict on a device and a host in one word, for a table."""
    if not fit(needs, limits):
        return "no"
    return "tight" if "device" in limits and is_tight(needs["device"], limits["device"]) else "yes"


def verdict(
    needs: Mapping[str, int], limits: Mapping[str, int], device: str, tokens: int | None = None
) -> Iterator[str]:
    """A line for the device, unless that is a CPU, and one for the host of a node.

    `tokens` are those whose checkpointed activations are counted, if they are.
    """
    node = f"The host of a node with {count_text(needs['ranks_per_node'], 'rank')}"
    places = {"host": node} if device == HOST else {"device": f"A {device} device", "host": node}
    counted = (
        f"with activations of {count_text(tokens, 'token')}, checkpointed" if tokens else "activations not counted"
    )
    for place, name in places.items():
        trains = place == "device" or device == HOST
        line = f"{name} needs {bytes_text(needs[place])}{f', {counted}' if trains else ''}"
        limit = limits.get(place)
        if limit is None:
            yield f"{line}{': fits if it has that' if limits and fit(needs, limits) else ''}."
        elif needs[place] > limit:
            yield f"{line}: DOES NOT FIT into {bytes_text(limit)}, {bytes_text(needs[place] - limit)} too much."
        else:
            fits = "tight: fits" if trains and is_tight(needs[place], limit) else "fits"
            left = f", and leaves {bytes_text(limit - needs[place])}" if trains else ""
            yield f"{line}: {fits} into {bytes_text(limit)}{left}{' for them' if trains and not tokens else ''}."
