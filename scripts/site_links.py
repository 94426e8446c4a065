"""Hooks of MkDocs, for what works in a checkout and not on a site.

In a checkout ``../examples/demo.py`` leads to the file. The site gets a copy of it in ``source/``; a link to a folder
becomes text. The footer names the version. Paths of tests in tables may break between file and function. The page of
model types shows the table that is beside it as a file. Docstrings show no roles of Sphinx.
"""

import csv
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files


ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[([^\]]+)\]\((?:\.\./)+([^)#\s]+)(#[^)\s]*)?\)")


CODE = re.compile(r"<code>([^<]+)</code>")
ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):(?=<code>)")


def on_config(config: Any) -> Any:
    """Name the version that these pages describe."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.copyright = f"{project['name']} {project['version']}"
    return config


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Let long names in code break after "::" and "/", where nothing is added to what is copied; drop roles."""
    html = ROLE.sub("", html)
    return CODE.sub(lambda match: "<code>" + re.sub(r"(::|/(?=\w))", r"\1<wbr>", match[1]) + "</code>", html)


def on_files(files: Files, config: Any) -> Files:
    """Add the files of the repository that the pages link to."""
    wanted = {match[1] for page in files.documentation_pages() for match in LINK.findall(page.content_string)}
    for name in sorted(wanted):
        if (ROOT / name).is_file():
            files.append(File.generated(config, f"source/{name}.txt", content=(ROOT / name).read_bytes()))
    return files


def model_types() -> str:
    """docs/models.csv in Markdown: how all runs of a family ended, in one cell of each type; why is in the file."""
    with (ROOT / "docs" / "models.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = [row for row in rows if not row["cannot be built"]]
    families: dict[str, list[str]] = {}
    for column in [name for name in found[0] if re.search(r"(zero3x|fsdp|tp|ep)\d", name)]:
        kind = next(kind for kind in ("ep", "tp", "fsdp", "zero3x") if re.search(rf"{kind}\d", column))
        families.setdefault({"zero3x": "ZeRO-3", "fsdp": "FSDP2", "tp": "TP", "ep": "EP"}[kind], []).append(column)
    lines = [["type", "conversions", *families], ["---"] * (len(families) + 2)]
    for row in found:
        lines.append([f"`{row['type']}`", row["conversion ops"], *(_ends(row, each) for each in families.values())])
    cannot = [["type", "cannot be built"], ["---"] * 2]
    cannot += [[f"`{row['type']}`", _escaped(why)] for row in rows if (why := row["cannot be built"])]
    return "\n\n".join("\n".join(f"| {' | '.join(cells)} |" for cells in each) for each in (lines, cannot))


def _ends(row: dict[str, str], columns: list[str]) -> str:
    ends = {name: re.split(r"[:(]", row[name])[0].strip() for name in columns if row[name]}
    ours = dict.fromkeys(end for name, end in ends.items() if not name.startswith("stock "))
    stock = dict.fromkeys(f"stock {end}" for name, end in ends.items() if name.startswith("stock ") and end != "equal")
    return ", ".join([*ours, *stock])


def _escaped(text: str) -> str:
    return re.sub(r"([\\*_`\[\]])", r"\\\1", text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;"))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links to copies; links to what is not there stay, and strict mode refuses them."""
    if "<!-- models.csv -->" in markdown:
        markdown = markdown.replace("<!-- models.csv -->", f"## All types\n\n{model_types()}")

    def replaced(match: re.Match[str]) -> str:
        text, name, _ = match.groups()
        if (ROOT / name).is_dir():
            return text
        copy = f"source/{name}.txt"
        if files.get_file_from_path(copy) is None:
            return match[0]
        return f"[{text}]({posixpath.relpath(copy, posixpath.dirname(page.file.src_uri) or '.')})"

    return LINK.sub(replaced, markdown)
