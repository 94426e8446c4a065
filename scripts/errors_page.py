"""The list in docs/errors.md, made of the docstrings of the errors: ``python -m scripts.errors_page`` writes it."""

import inspect
from pathlib import Path

from hf_zero_stream import errors


PAGE = Path(__file__).resolve().parents[1] / "docs" / "errors.md"
MARKS = "<!-- errors -->\n\n", "\n<!-- end of errors -->\n"


def page() -> str:
    """The page, with what the docstrings say now: when each error is raised, and what to do."""
    lines = []
    for kind in (getattr(errors, name) for name in errors.__all__):
        if isinstance(kind, type):
            text = " ".join((inspect.getdoc(kind) or "").split())
            lines.append(f"- **`{kind.__name__}`** (`{kind.__bases__[-1].__name__}`): {text}\n")
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    return "".join([before, MARKS[0], *lines, MARKS[1], rest.partition(MARKS[1])[2]])


if __name__ == "__main__":
    PAGE.write_text(page())
