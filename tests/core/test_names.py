"""Names mean one thing each in the whole package."""

import ast
from collections import defaultdict

from tests.core.test_imports import MODULES


def test_no_class_name_is_defined_twice() -> None:
    """Classes, and names of types in capitals, by whatever module; those of functions' bodies count too."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].add(module)
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name, value = node.targets[0].id, node.value
                is_type = name.lstrip("_")[:1].isupper() and not name.isupper()
                if is_type and isinstance(value, (ast.Subscript, ast.BinOp, ast.Name, ast.Attribute)):
                    found[name].add(module)
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}
