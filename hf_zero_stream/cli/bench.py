"""``hf-zero-stream bench``: one load by stock transformers and DeepSpeed, one by streaming, side by side."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..reports.text import bytes_text
from . import frame


EXAMPLE = "hf-zero-stream bench Qwen/Qwen3-0.6B --nproc 2"

ARMS = ("stock", "streaming")
_BAR = 48
"""Characters of the longest bar: with its name and its number it fits into 80 columns."""

_ROWS = {
    "bytes_read": "read from files, each rank (stock: pages of mapped files)",
    "anonymous_growth_bytes": "growth of anonymous host memory, each rank",
    "partition_bytes": "partitions, each rank",
}


def run(
    path: frame.CheckpointArgument,
    nproc: Annotated[int, typer.Option(min=1, help="Ranks to start on this machine.")] = 2,
    ds_config: frame.DsConfigOption = None,
    dtype: frame.DtypeOption = None,
    cache: Annotated[
        Literal["warm", "cold"], typer.Option(help="Read the shards once before each load, or drop them.")
    ] = "warm",
    revision: frame.RevisionOption = None,
    form: frame.FormatOption = "table",
) -> None:
    """Compare stock's load and a streaming load on this machine.

    Each load has its own processes, started by torchrun. Without --ds-config and --dtype it is in bf16. Exit code 1 if
    one fails, or if they load different bits. A repository's id means what the Hub's cache holds of it.
    """
    from ..checkpoint.soundness import shards_of
    from .checkpoints import cached_folder

    config = frame.zero3_config(ds_config, dtype if ds_config or dtype else "bf16")
    config = {"train_micro_batch_size_per_gpu": 1, **config}
    folder = cached_folder(path, revision)
    shards = shards_of(folder)[0]
    prepare_cache = drop_from_cache if cache == "cold" else fill_cache
    arms: dict[str, dict[str, Any]] = {}
    with frame.quiet(), tempfile.TemporaryDirectory(prefix="hf-zero-stream-") as name:
        Path(name, "config.json").write_text(json.dumps(config))
        for arm in ARMS:
            prepare_cache(shards)
            arms[arm] = _run_arm(arm, folder, nproc, Path(name))

    stock, streaming = (found.get("digests", [None]) for found in arms.values())
    same = None if None in [*stock, *streaming] else stock == streaming
    data = {"path": path, "ranks": nproc, "cache": cache, "arms": arms, "same_bits": same}
    failed = any("error" in found for found in arms.values())
    frame.emit(data, _blocks(data), form, ok=same is not False and not failed)


def fill_cache(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Bring these files into the page cache: read each once."""
    for path in paths:
        with open(path, "rb") as file, open(os.devnull, "wb") as nowhere:
            shutil.copyfileobj(file, nowhere, 8 << 20)


def drop_from_cache(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Drop these files from the page cache."""
    os.sync()  # what is not written yet cannot be dropped
    for path in paths:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _run_arm(arm: str, folder: Path, nproc: int, results: Path) -> dict[str, Any]:
    """Run the ranks of one load; returns the figures of all, or the error of the first that failed."""
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
        **{key: [found[key] for found in ranks] for key in _ROWS},
        "digests": [found["digest"] for found in ranks],
    }


def _blocks(data: Mapping[str, Any]) -> Iterator[str]:
    arms, same = data["arms"], data["same_bits"]
    yield f"{data['path']}: {data['ranks']} ranks, page cache {data['cache']}"
    rows = [("seconds", *(f"{found['seconds']:.2f}" if "seconds" in found else "failed" for found in arms.values()))]
    for key, title in _ROWS.items():
        rows.append((title, *(_all_ranks(found[key]) if key in found else "failed" for found in arms.values())))
    yield frame.table(("", *ARMS), rows)
    yield from _bars(arms)
    yield from (f"The {arm} load failed: {found['error']}" for arm, found in arms.items() if "error" in found)
    if same is not None:
        yield "Both loaded the same bits." if same else "The two loaded DIFFERENT bits."


def _bars(arms: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Seconds and memory of both loads as bars, in plain characters: a log file shows them too."""
    if any("error" in found for found in arms.values()):
        return
    seconds = {arm: found["seconds"] for arm, found in arms.items()}
    memory = {arm: max(found["anonymous_growth_bytes"]) for arm, found in arms.items()}
    pictures = {
        "seconds": [(arm, value, f"{value:.2f} s") for arm, value in seconds.items()],
        "growth of host memory": [(arm, value, bytes_text(value)) for arm, value in memory.items()],
    }
    for title, rows in pictures.items():
        most = max(value for _, value, _ in rows) or 1
        width = max(len(arm) for arm, _, _ in rows)
        lines = [f"{arm:{width}}  {'#' * round(_BAR * max(value, 0) / most)} {text}" for arm, value, text in rows]
        yield "\n".join([title, *lines])


def _all_ranks(sizes: list[int]) -> str:
    if len(sizes) > 2:
        return f"{bytes_text(min(sizes))} to {bytes_text(max(sizes))}"
    return ", ".join(map(bytes_text, sizes))
