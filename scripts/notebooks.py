"""Run the notebooks, and keep what they show beside their cells, so that it can be read where it is not run.

    python -m scripts.notebooks

Kept are pictures, and what the cells print; not what libraries log, times, and paths of this machine.
"""

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient


NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))
LOGGED = re.compile(
    r"^(?:\[?\d{4}-\d\d-\d\d .*|\[Gloo.*|DeepSpeed .* built successfully|Launching training on .*)\n+", re.MULTILINE
)
"""Lines of logs, among what ranks print."""
TEMPORARY = re.compile(rf"{re.escape(tempfile.gettempdir())}/([a-z-]+-)\w+")


class ThisPython(AsyncKernelManager):
    """Starts kernels with the Python that runs this, whatever kernels the user has installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"])


def execute(path: Path, folder: str) -> Any:
    """The notebook after a run of all its cells in `folder`, outputs included."""
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": folder}}
    client = NotebookClient(
        notebook, timeout=180, kernel_manager_class=ThisPython, resources=where, record_timing=False
    )
    client.execute()
    return notebook


def shown(outputs: list[Any]) -> list[Any]:
    """What is kept of a cell's outputs: what it printed, as one, and the rest."""
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    text = re.sub(r"\n{2,}$", "\n", TEMPORARY.sub(r"\1...", LOGGED.sub("", printed)))
    others = [output for output in outputs if output.output_type != "stream"]
    return [nbformat.v4.new_output("stream", text=text), *others] if text else others


def main() -> None:
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error"}
    for path in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            notebook = execute(path, folder)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs = shown(cell.outputs)
        notebook.metadata.language_info = {"name": "python"}
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
