"""What docs/architecture.md names is there, and a load calls the functions of its table in that order."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import hf_zero_stream
from tests.support.cluster import run_ranks
from tests.support.parity import ds_config
from tests.support.zoo import Checkpoint


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGE = ROOT / "hf_zero_stream"


def names_in(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from names_in(node.body, f"{node.name}.")
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))


@pytest.mark.parametrize("place", sorted(set(re.findall(r"`(\w+/[\w/]+\.py(?:::[\w.]+)?)`", PAGE))))
def test_what_is_named_is_there(place: str) -> None:
    file, _, name = place.partition("::")
    (path,) = [root / file for root in (PACKAGE, ROOT) if (root / file).exists()]
    assert not name or name in names_in(ast.parse(path.read_text()).body)


def functions_of(section: str) -> list[str]:
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(\S+)` \|", text, re.MULTILINE)


def called_by_a_load(folder: Path, functions: list[str]) -> list[str]:
    """Those of `functions` that a load calls, each at its first call."""
    called: dict[str, None] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(PACKAGE)):
            called[f"{Path(path).relative_to(PACKAGE)}::{frame.f_code.co_qualname}"] = None

    sys.setprofile(note)
    try:
        hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(folder, ds_config=ds_config())
    finally:
        sys.setprofile(None)
    return [name for name in called if name in functions]


def test_a_load_in_ten_functions(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    functions = functions_of("A load in ten functions")
    assert len(functions) == 10
    assert run_ranks(2, called_by_a_load, zoo_checkpoint("llama"), functions) == [functions] * 2
