"""docs/arguments.md has a row for each argument that the installed transformers knows, and its tests exist."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import transformers
from transformers.models.auto import auto_factory


ROOT = Path(__file__).resolve().parents[2]
OURS = {"ds_config", "strict"}


def rows() -> dict[str, list[str]]:
    """Argument -> the tests that its row names."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / "docs" / "arguments.md").read_text().splitlines():
        match = re.match(r"\| `(\w+)` \|.*\|([^|]*)\|$", line)
        if match:
            assert match[1] not in found, f"two rows for {match[1]}"
            found[match[1]] = re.findall(r"`([^`]+)`", match[2])
    return found


def arguments_of(function: object) -> set[str]:
    """Parameters, what is popped from `kwargs` by name, and what is popped in loops over lists of names."""
    function = inspect.unwrap(getattr(function, "__func__", function))  # type: ignore[arg-type]
    source = inspect.getsource(function)
    found = {name for name in inspect.signature(function).parameters if name not in ("cls", "self")}
    found |= set(re.findall(r"\bkwargs\.(?:pop|get)\(\s*\"(\w+)\"", source))
    found |= set(re.findall(r"\"(\w+)\" in kwargs", source))
    for names in re.findall(r"(?:for name in|hub_kwargs_names =) (\[[^\]]*\])", source):
        found |= set(ast.literal_eval(names))
    return found


def known() -> set[str]:
    return (
        arguments_of(transformers.PreTrainedModel.from_pretrained)
        | arguments_of(auto_factory._BaseAutoModelClass.from_pretrained)
        | arguments_of(auto_factory._BaseAutoBackboneClass.from_pretrained)
    )


def test_arguments_are_found() -> None:
    """The reading of the source works: some of each kind."""
    assert {"config", "model_args", "dtype", "mirror", "attn_implementation", "code_revision"} <= known()


def test_each_argument_has_a_row() -> None:
    assert known() - rows().keys() == set()


def test_each_row_is_an_argument() -> None:
    assert rows().keys() - known() == OURS


def test_each_named_test_exists() -> None:
    for argument, tests in rows().items():
        assert tests, f"{argument}: no test"
        for test in tests:
            path, _, name = test.partition("::")
            tree = ast.parse((ROOT / path).read_text())
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test
