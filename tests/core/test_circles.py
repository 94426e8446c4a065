"""Imports of modules make no circle inside a room: import-linter looks at rooms only."""

import networkx

from tests.core.test_imports import MODULES, imports_of


def test_there_are_no_circles() -> None:
    """Imports in functions and those for type checkers count too."""
    graph = networkx.DiGraph()
    for module in MODULES:
        for source, name in imports_of(module):
            imported = f"{source}.{name}" if f"{source}.{name}" in MODULES else source
            if imported in MODULES and imported != module:
                graph.add_edge(module, imported)
    circles = [circle for circle in networkx.strongly_connected_components(graph) if len(circle) > 1]
    assert circles == []
