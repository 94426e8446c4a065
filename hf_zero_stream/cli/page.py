"""Writes the page of ``plan --html``: memory of every rank as bars, the tables and the verdict, without scripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

from ..footprint.memory import HOST, MemoryFootprint
from ..loading.dry_load import Forecast
from ..reports.text import bytes_text


__all__ = ["write_page"]

_WIDTH, _HEIGHT, _GAP, _LABEL = 640, 16, 5, 110
_COLOURS = {
    "partitions": "#4477aa",
    "buffers": "#66ccee",
    "fp32 copies": "#228833",
    "gradients": "#ccbb44",
    "reduce bucket": "#ee6677",
    "hpZ copies": "#aa3377",
    "optimizer states": "#bbbbbb",
    "swap buffers": "#999933",
    "for a moment": "#eeeeee",
}
_PHASES = {"load": "load_peak", "deepspeed.initialize": "start_peak", "step": "step_peak"}

_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>$title</title>
<style>
body { font-family: sans-serif; margin: 2em; color: #222; }
pre { overflow-x: auto; background: #f6f6f6; padding: 1em; }
li { list-style: none; display: inline-block; margin-right: 1.2em; }
li span { display: inline-block; width: 1em; height: 1em; margin-right: 0.4em; border: 1px solid #888; }
svg { display: block; margin: 0.5em 0; max-width: 100%; }
</style>
</head>
<body>
<h1>$title</h1>
<p>Memory of a rank between steps, computed. A vertical line is a peak: point at it to see of which phase. Activations
and gathered parameters are not in it.</p>
<ul>$legend</ul>
$bars
<h2>Rank $rank</h2>
$blocks
</body>
</html>
""")


def write_page(
    path: Path,
    title: str,
    forecasts: Sequence[Forecast],
    device: str,
    limits: Mapping[str, int],
    blocks: Sequence[str],
) -> None:
    """Write the page.

    Args:
        forecasts: one for each rank that is shown; `blocks` are the tables of the first.
        limits: bytes that a rank may use, by place: "cpu" or `device`.
    """
    legend = "".join(f'<li><span style="background:{colour}"></span>{part}</li>' for part, colour in _COLOURS.items())
    ordered = sorted(forecasts, key=lambda forecast: forecast.load.rank)
    page = _PAGE.substitute(
        title=escape(title),
        legend=legend,
        bars="\n".join(_section(place, ordered, limits.get(place)) for place in dict.fromkeys((device, HOST))),
        rank=forecasts[0].load.rank,
        blocks="\n".join(f"<pre>{escape(block)}</pre>" for block in blocks),
    )
    path.write_text(page, encoding="utf-8")


def _section(place: str, forecasts: Sequence[Forecast], limit: int | None) -> str:
    most = max([limit or 0, *(max(_peaks(forecast.memory, place).values()) for forecast in forecasts)])
    if not most:
        return ""
    rows = [
        f'<g transform="translate(0 {number * (_HEIGHT + _GAP)})">{"".join(_bar(forecast, place, most))}</g>'
        for number, forecast in enumerate(forecasts)
    ]
    height = len(rows) * (_HEIGHT + _GAP)
    if limit:
        x = _LABEL + _WIDTH * limit / most
        rows.append(_line(x, height, f"limit: {bytes_text(limit)}", "#cc0000", 2))
    return (
        f"<h2>{escape(place)}</h2>\n"
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LABEL + _WIDTH + 90}" height="{height}">'
        f"{''.join(rows)}</svg>"
    )


def _bar(forecast: Forecast, place: str, most: int) -> Iterator[str]:
    memory, start = forecast.memory, 0
    peaks = _peaks(memory, place)
    yield f'<text x="0" y="{_HEIGHT - 3}" font-size="12">rank {forecast.load.rank}</text>'
    parts = [(part, nbytes) for part, nbytes in _held(memory, place) if nbytes]
    held = sum(nbytes for _, nbytes in parts)
    for part, nbytes in (*parts, ("for a moment", max(peaks.values()) - held)):
        if nbytes > 0:
            x, width = _LABEL + _WIDTH * start / most, _WIDTH * nbytes / most
            yield (
                f'<rect x="{x:.1f}" y="0" width="{width:.1f}" height="{_HEIGHT}" fill="{_COLOURS[part]}">'
                f"<title>{part}: {bytes_text(nbytes)}</title></rect>"
            )
            start += nbytes
    for phase, nbytes in peaks.items():
        if nbytes:
            yield _line(_LABEL + _WIDTH * nbytes / most, _HEIGHT, f"peak of {phase}: {bytes_text(nbytes)}", "#222", 1)
    end = _LABEL + _WIDTH * max(*peaks.values(), held) / most + 4
    yield f'<text x="{end:.1f}" y="{_HEIGHT - 3}" font-size="11">{bytes_text(max(*peaks.values(), held))}</text>'


def _line(x: float, height: int, title: str, colour: str, width: int) -> str:
    return (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}" stroke="{colour}" stroke-width="{width}">'
        f"<title>{title}</title></line>"
    )


def _peaks(memory: MemoryFootprint, place: str) -> dict[str, int]:
    return {phase: getattr(memory, name).get(place, 0) for phase, name in _PHASES.items()}


def _held(memory: MemoryFootprint, place: str) -> Iterator[tuple[str, int]]:
    of_parts = {
        "partitions": memory.partitions,
        "buffers": memory.buffers,
        "fp32 copies": memory.master,
        "gradients": memory.gradients,
        "reduce bucket": memory.reduce_bucket,
        "hpZ copies": memory.secondary,
        "optimizer states": memory.optimizer_states,
        "swap buffers": {HOST: memory.swap_buffers},
    }
    for part, places in of_parts.items():
        yield part, places.get(place, 0)
