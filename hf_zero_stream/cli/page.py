"""Writes the page of ``plan --html``: memory of every rank as bars, the tables and the verdict, without scripts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

from ..footprint.memory import HOST, MemoryFootprint
from ..loading.dry_load import Forecast
from ..reports.text import bytes_text


_WIDTH, _HEIGHT, _GAP, _LABEL, _HEAD, _FOOT = 640, 16, 5, 70, 20, 24
_COLOURS = {
    "partitions": "#4477aa",
    "buffers": "#66ccee",
    "fp32 copies": "#228833",
    "gradients": "#ccbb44",
    "reduce bucket": "#ee6677",
    "hpZ copies": "#aa3377",
    "optimizer states": "#bbbbbb",
    "swap buffers": "#999933",
    "at a peak only": "#eeeeee",
}
_PHASES = {
    "load": ("load_peak", "dotted", "1 2"),
    "deepspeed.initialize": ("start_peak", "dashed", "4 2"),
    "step": ("step_peak", "solid", "none"),
}
"""Phase -> (field of a footprint, style of its line in the legend, the same in the bars)."""

_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>$title</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 62em; padding: 0 1.5em; color: #222; }
h1 { font-size: 1.6em; } h2 { font-size: 1.2em; margin-top: 2em; }
ul { padding: 0; } li { list-style: none; display: inline-block; margin-right: 1.2em; }
li span { display: inline-block; width: 0.9em; height: 0.9em; margin-right: 0.4em; vertical-align: -0.1em; }
li i { display: inline-block; height: 1em; margin-right: 0.4em; vertical-align: -0.2em; border-left: 2px #222; }
svg { display: block; max-width: 100%; height: auto; font-size: 12px; }
table { border-collapse: collapse; margin: 1.5em 0; }
th, td { padding: 0.3em 0.8em; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
.verdict { padding: 0.6em 1em; border-left: 4px solid #228833; background: #f2f8f3; }
.bad { border-color: #cc0000; background: #fdf1f1; }
</style>
</head>
<body>
<h1>$title</h1>
$verdict
<p>Each bar is the memory of one rank, computed before anything is loaded. Colours are what the rank holds between
steps. Lines mark the peaks, and the number is the highest of them. Activations and gathered parameters are not
counted.</p>
<ul>$legend</ul>
$bars
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
        forecasts: one for each rank that is shown.
        limits: bytes that a rank may use, by place: "cpu" or `device`.
        blocks: what the command prints of the first of `forecasts`: texts and tables, the verdict last.
    """
    ordered = sorted(forecasts, key=lambda forecast: forecast.load.rank)
    names = {device: f"Device ({device}), each rank", HOST: "Host memory (cpu), share of each rank"}
    page = _PAGE.substitute(
        title=escape(title),
        verdict=_paragraph(blocks[-1]),
        legend="".join(_legend(ordered, names)),
        bars="\n".join(_section(place, names[place], ordered, limits.get(place)) for place in names),
        blocks="\n".join(_table(block) if block.startswith("|") else _paragraph(block) for block in blocks[:-1]),
    )
    path.write_text(page, encoding="utf-8")


def _paragraph(text: str) -> str:
    """Lines of text; those of a verdict are marked."""
    lines = []
    for line in text.splitlines():
        kind = ' class="verdict bad"' if "DOES NOT FIT" in line else ' class="verdict"' if "needs" in line else ""
        lines.append(f"<p{kind}>{escape(line)}</p>")
    return "\n".join(lines)


def _table(markdown: str) -> str:
    """A table as :func:`.frame.table` writes it, in HTML."""
    titles, _, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in markdown.splitlines())
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in body)}</table>"


def _legend(forecasts: Sequence[Forecast], places: Iterable[str]) -> Iterator[str]:
    """The parts that some bar shows, then the phases."""
    memory = [forecast.memory for forecast in forecasts]
    shown = {part for place in places for one in memory for part, nbytes in _held(one, place) if nbytes}
    for part, colour in _COLOURS.items():
        if part in shown or part == "at a peak only":
            yield f'<li><span style="background:{colour}"></span>{part}</li>'
    for phase in _peaks(memory[0], HOST):
        yield f'<li><i style="border-left-style:{_PHASES[phase][1]}"></i>peak of {phase}</li>'


def _section(place: str, name: str, forecasts: Sequence[Forecast], limit: int | None) -> str:
    most = max([limit or 0, *(max(_peaks(forecast.memory, place).values()) for forecast in forecasts)])
    if not most:
        return ""
    rows = [
        f'<g transform="translate(0 {_HEAD + number * (_HEIGHT + _GAP)})">{"".join(_bar(forecast, place, most))}</g>'
        for number, forecast in enumerate(forecasts)
    ]
    bottom = _HEAD + len(rows) * (_HEIGHT + _GAP)
    for share in (0, 0.25, 0.5, 0.75, 1):
        anchor = "start" if share == 0 else "middle"
        label = bytes_text(most * share) if share else "0"
        rows.append(_text(_LABEL + _WIDTH * share, bottom + 14, label, f'text-anchor="{anchor}" fill="#777"'))
    if limit:
        x = _LABEL + _WIDTH * limit / most
        rows.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_HEAD - 4}" y2="{bottom}" stroke="#cc0000" stroke-width="2"/>'
        )
        rows.append(_text(x, 12, f"limit: {bytes_text(limit)}", 'text-anchor="middle" fill="#cc0000"'))
    width, height = _LABEL + _WIDTH + 90, bottom + _FOOT
    return (
        f"<h2>{escape(name)}</h2>\n"
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f"{''.join(rows)}</svg>"
    )


def _bar(forecast: Forecast, place: str, most: int) -> Iterator[str]:
    memory, start = forecast.memory, 0
    peaks = _peaks(memory, place)
    yield _text(0, _HEIGHT - 3, f"rank {forecast.load.rank}")
    parts = [(part, nbytes) for part, nbytes in _held(memory, place) if nbytes]
    held = sum(nbytes for _, nbytes in parts)
    highest = max(*peaks.values(), held)
    for part, nbytes in (*parts, ("at a peak only", highest - held)):
        if nbytes > 0:
            x, width = _LABEL + _WIDTH * start / most, _WIDTH * nbytes / most
            yield (
                f'<rect x="{x:.1f}" y="0" width="{width:.1f}" height="{_HEIGHT}" fill="{_COLOURS[part]}">'
                f"<title>{part}: {bytes_text(nbytes)}</title></rect>"
            )
            start += nbytes
    for phase, nbytes in peaks.items():
        if nbytes:
            x = _LABEL + _WIDTH * nbytes / most
            yield (
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{_HEIGHT}" stroke="#222" stroke-width="1.5" '
                f'stroke-dasharray="{_PHASES[phase][2]}"><title>peak of {phase}: {bytes_text(nbytes)}</title></line>'
            )
    yield _text(_LABEL + _WIDTH * highest / most + 5, _HEIGHT - 3, bytes_text(highest))


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.0f}" {attributes}>{text}</text>'


def _peaks(memory: MemoryFootprint, place: str) -> dict[str, int]:
    return {
        phase: getattr(memory, name).get(place, 0)
        for phase, (name, *_) in _PHASES.items()
        if memory.engine == "deepspeed" or phase != "deepspeed.initialize"
    }


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
