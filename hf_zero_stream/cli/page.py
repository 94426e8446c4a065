"""The page of ``plan --html`` and ``demo --html``: a picture and what the command prints, without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from jinja2 import Environment  # which torch needs
from markupsafe import Markup


_PAGE = Environment(autoescape=True).from_string("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{{ title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1.5em; color: #222; }
svg { display: block; max-width: 100%; height: auto; }
table { border-collapse: collapse; margin: 1.5em 0; }
td { padding: 0.3em 0.8em; border-bottom: 1px solid #ddd; text-align: right; }
td:first-child { text-align: left; }
tr:first-child { font-weight: bold; }
.verdict { padding: 0.6em 1em; border-left: 4px solid #228833; background: #f2f8f3; }
.tight { border-color: #cc9900; background: #fdf8e8; }
.bad { border-color: #cc0000; background: #fdf1f1; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
{%- for line in blocks[-1].splitlines() %}
{%- set is_bad = "DOES NOT FIT" in line or line.startswith("✗") %}
{%- set is_good = "needs" in line or line.startswith("✓") %}
{%- set is_open = "tight: fits" in line or "fits if" in line %}
<p class="{{ 'verdict bad' if is_bad else 'verdict tight' if is_open else 'verdict' if is_good }}">{{ line }}</p>
{%- endfor %}
{{ picture }}
<p>{{ note }}</p>
{%- for block in blocks[:-1] %}
{%- if block.startswith("|") %}
<table>
{%- for line in block.splitlines() if not line.startswith("|-") %}
<tr>{% for cell in line[1:-1].split("|") %}<td>{{ cell.strip() }}</td>{% endfor %}</tr>
{%- endfor %}
</table>
{%- else %}
{%- for line in block.splitlines() %}
<p>{{ line }}</p>
{%- endfor %}
{%- endif %}
{%- endfor %}
</body>
</html>
""")


def write_page(path: Path, title: str, picture: str, note: str, blocks: Sequence[str]) -> None:
    """Write the page around an SVG and a `note` on it; `blocks` are what the command prints, the verdict last."""
    page = _PAGE.render(title=title, picture=Markup(picture), note=note, blocks=blocks)
    path.write_text(page, encoding="utf-8")


def svg_of(figure: Any) -> str:
    """A figure of matplotlib as an element of a page."""
    from matplotlib import rc_context

    file = StringIO()
    with rc_context({"svg.fonttype": "none"}):  # text that can be searched
        figure.savefig(file, format="svg")
    return file.getvalue()[file.getvalue().index("<svg") :]
