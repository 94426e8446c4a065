"""The fence: what plug-ins import of the core is one module, and all that is in it is used."""

import ast
import subprocess
import sys

import pytest

from hf_zero_stream import plugin_api
from hf_zero_stream.registry import OURS
from tests.support.cluster import ROOT


OF_PLUGINS = [*(ROOT / "hf_zero_stream" / "plugins").rglob("*.py"), *(ROOT / "tests" / "plugins").rglob("*.py")]


@pytest.mark.plugin(*OURS)
def test_every_name_has_a_user() -> None:
    imports = [
        node
        for path in OF_PLUGINS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("plugin_api")
    ]
    used = {name.name for node in imports for name in node.names}
    assert used == set(dir(plugin_api))


def test_every_name_is_there() -> None:
    for name in dir(plugin_api):
        assert getattr(plugin_api, name) is not None, name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(plugin_api, "nothing")


def test_it_imports_what_is_asked_for() -> None:
    """A module of the core stands for itself, also if nobody has imported it; and nothing is imported in vain."""
    code = (
        "import sys\nfrom hf_zero_stream.plugin_api import accelerators, Plugin\n"
        "assert accelerators.__name__ == 'hf_zero_stream.accelerators'\n"
        "assert Plugin.__module__ == 'hf_zero_stream.registry'\n"
        "rooms = {name.split('.')[1] for name in sys.modules if name.startswith('hf_zero_stream.')}\n"
        "assert rooms == {'accelerators', 'errors', 'plugin_api', 'registry', 'settings'}, rooms\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
