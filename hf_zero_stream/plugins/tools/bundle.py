"""Writes the file of ``doctor --bundle`` for an issue: checks, versions, configs, a report, variables; no secrets."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import yaml

from ... import __version__
from ...errors import PACKAGE


_PACKAGES = (
    *("accelerate", "bitsandbytes", "compressed-tensors", "datasets", "deepspeed", "flash-attn", "gguf", "lightning"),
    *("huggingface_hub", "llamafactory", "ms-swift", "numpy", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "obstore"),
    *("peft", "ray", "safetensors", "tokenizers", "torch", "transformers", "triton", "trl"),
)

_VARIABLES = re.compile(
    r"(HF|HUGGINGFACE|TRANSFORMERS|ACCELERATE|FSDP|DS|DEEPSPEED|TORCH|PYTORCH|NCCL|GLOO|CUDA|NVIDIA|HIP|ROCR|OMP|MKL"
    r"|SLURM|OMPI|PMI|TOKENIZERS)_\w+|((LOCAL|GROUP|NODE)_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|(PYTHON)?PATH"
)
"""Variables on which a load depends; others are nobody's business."""

_SECRET_NAMES = re.compile("token(?!iz)|secret|passw|credential|cookie|auth(?!or)|(api|access|private)_?key", re.I)
_SECRETS = re.compile(r"(?<=://)[^/@\s]+(?=@)|(?<=[?&])[^\s\"']+|\b(hf_|sk-|gh[a-z]_|AKIA)\w{12,}")
"""Name and password of a URL, its query, and what well-known tokens look like."""

_HIDDEN = "(hidden)"


def without_secrets(found: Any, name: str = "") -> Any:
    """A copy of JSON data without what a `name` or its own form shows to be secret, and with "~" for the home."""
    if isinstance(found, Mapping):
        return {key: without_secrets(value, str(key)) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [without_secrets(value, name) for value in found]
    if not isinstance(found, str):
        return found
    home = os.path.expanduser("~")
    text = found.replace(home, "~") if len(home) > 1 else found
    return _HIDDEN if _SECRET_NAMES.search(name) else _SECRETS.sub(_HIDDEN, text)


def write_bundle(path: Path, accelerate_config: str, **found: Any) -> None:
    """Write `found`, with what one would ask for next, as JSON; `accelerate_config` is a file that need not exist."""
    config = None
    with suppress(OSError, ValueError, yaml.YAMLError):
        config = yaml.safe_load(Path(accelerate_config).read_text(encoding="utf-8"))
    bundle = {
        PACKAGE: __version__,
        "machine": {
            "system": platform.platform(),
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
        },
        "packages": dict(_packages()),
        "environment": {name: os.environ[name] for name in sorted(os.environ) if _VARIABLES.fullmatch(name)},
        "accelerate_config": config,
        **found,
    }
    path.write_text(json.dumps(without_secrets(bundle), indent=2, default=str) + "\n", encoding="utf-8")


def _packages() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)
