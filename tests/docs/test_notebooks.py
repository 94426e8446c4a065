"""Every notebook runs from top to bottom, and is committed without outputs."""

import re
import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from tests.support.cluster import ROOT
from tests.support.commands import command_environment


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
EXPECTED = {
    "quickstart.ipynb": [
        r"STREAMING LOAD REPORT \(2 ranks",
        r"stock, rank 1: host memory grew by at most \d+ MiB",
        r"streaming, rank 1: host memory grew by at most \d+ MiB",
        r"loss of one step: \d",
        r"saved [\d.]+ [MG]iB in \d shards? to",
        r"reloaded: (\d+) of \1 partitions",
    ],
    "weight_stream.ipynb": [
        r"the engine got (\d+) tensors; \1 of \1 are what a gather gives",
        r"gathered, rank 1: [\d.]+ s, host memory grew by at most \d+ MiB",
        r"streamed, rank 1: [\d.]+ s, host memory grew by at most \d+ MiB",
    ],
}


class ThisPython(AsyncKernelManager):
    """Starts kernels with the Python that runs the tests, whatever kernels the user has installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_is_committed_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
@pytest.mark.slow
def test_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of its own, so that it cannot lean on the repository's files."""
    for name, value in command_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=180, kernel_manager_class=ThisPython, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    printed = "".join(
        output.text
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "stream"
    )
    for pattern in EXPECTED[path.name]:
        assert re.search(pattern, printed), printed
    shown = [output.data for cell in notebook.cells for output in cell.get("outputs", ()) if "data" in output]
    assert any("image/png" in data for data in shown), "the memory curves"
