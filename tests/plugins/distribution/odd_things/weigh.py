"""A command: the size of a file."""

from __future__ import annotations

from pathlib import Path


EXAMPLE = "hf-zero-stream weigh model.safetensors"


def run(path: Path) -> None:
    """Say how many bytes a file has."""
    print(f"{path.stat().st_size} bytes")
