"""``hf-zero-stream bench``: one load by stock transformers and DeepSpeed, one by streaming, side by side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from . import page_cache
from .output import CheckpointArgument, Format, FormatOption, RevisionOption, bytes_text, emit, quiet, table
from .settings import Dtype, zero3_config


EXAMPLE = "hf-zero-stream bench Qwen/Qwen3-0.6B --nproc 2"

ARMS = ("stock", "streaming")
_MOST_LISTED = 2


class Cache(str, Enum):
    """What each load finds of the shards in the page cache."""

    warm = "warm"
    cold = "cold"


def run(
    path: CheckpointArgument,
    nproc: Annotated[int, typer.Option(min=1, help="Ranks to start on this machine.")] = 2,
    ds_config: Annotated[str | None, typer.Option(metavar="FILE", help="DeepSpeed config; default: ZeRO-3.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Dtype to load in; default: the config's, else bf16.")] = None,
    cache: Annotated[Cache, typer.Option(help="Read the shards once before each load, or drop them.")] = Cache.warm,
    revision: RevisionOption = None,
    form: FormatOption = Format.table,
) -> None:
    """Load a checkpoint under ZeRO-3 on this machine, as stock does and streaming, and compare.

    Each load has its own processes, started by torchrun. Exit code 1 if one fails, or if they load different bits.
    A repository's id means what the Hub's cache holds of it.
    """
    from ..checkpoint.soundness import shards_of
    from .checkpoints import cached_folder

    config = zero3_config(ds_config, dtype if ds_config or dtype else Dtype.bf16)
    config = {"train_micro_batch_size_per_gpu": 1, **config}
    folder = cached_folder(path, revision)
    shards = shards_of(folder)[0]
    with quiet(), tempfile.TemporaryDirectory(prefix="hf-zero-stream-") as name:
        Path(name, "config.json").write_text(json.dumps(config))
        arms = {arm: _run_arm(arm, folder, shards, nproc, cache, Path(name)) for arm in ARMS}

    digests = {arm: found["digests"] for arm, found in arms.items() if "error" not in found}
    compared = len(digests) == len(ARMS) and None not in [digest for each in digests.values() for digest in each]
    same = digests["stock"] == digests["streaming"] if compared else None
    data = {"path": path, "ranks": nproc, "cache": cache.value, "arms": arms, "same_bits": same}
    blocks: list[Table | str] = [f"{path}: {nproc} ranks, page cache {cache.value}", table(("", *ARMS), _rows(arms))]
    blocks += [f"The {arm} load failed: {found['error']}" for arm, found in arms.items() if "error" in found]
    if same is not None:
        blocks.append("Both loaded the same bits." if same else "The two loaded DIFFERENT bits.")
    emit(data, blocks, form)
    if same is False or any("error" in found for found in arms.values()):
        raise typer.Exit(1)


def _run_arm(arm: str, folder: Path, shards: list[str], nproc: int, cache: Cache, results: Path) -> dict[str, Any]:
    """Start the ranks of one load; returns their figures together, or the error of the first that failed."""
    (page_cache.drop if cache is Cache.cold else page_cache.fill)(shards)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    rank = ["-m", "hf_zero_stream.cli.bench_rank", arm, str(folder), str(results / "config.json"), str(results)]
    done = subprocess.run(
        [*torchrun, *rank],
        env={"OMP_NUM_THREADS": "1", **os.environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    files = [results / f"{arm}-{number}.json" for number in range(nproc)]
    ranks = [json.loads(file.read_text()) for file in files if file.exists()]
    errors = [found["error"] for found in ranks if "error" in found]
    if errors or len(ranks) < nproc or done.returncode:
        return {"error": errors[0] if errors else f"exit code {done.returncode}:\n{done.stdout.strip()[-2000:]}"}
    return {
        "seconds": max(found["seconds"] for found in ranks),
        "bytes_read": [found["bytes_read"] for found in ranks],
        "anonymous_growth_bytes": [found["anonymous_growth_bytes"] for found in ranks],
        "partition_bytes": [found["partition_bytes"] for found in ranks],
        "digests": [found["digest"] for found in ranks],
    }


def _rows(arms: dict[str, dict[str, Any]]) -> list[list[str]]:
    def row(title: str, key: str) -> list[str]:
        return [title, *("failed" if "error" in found else _texts(found[key]) for found in arms.values())]

    return [
        row("seconds", "seconds"),
        row("read from files, each rank (stock: pages of mapped files)", "bytes_read"),
        row("growth of anonymous host memory, each rank", "anonymous_growth_bytes"),
        row("partitions, each rank", "partition_bytes"),
    ]


def _texts(value: float | list[int]) -> str:
    if not isinstance(value, list):
        return f"{value:.2f}"
    if len(value) <= _MOST_LISTED:
        return ", ".join(map(bytes_text, value))
    return f"{bytes_text(min(value))} to {bytes_text(max(value))}"
