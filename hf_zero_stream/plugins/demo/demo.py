"""``hf-zero-stream demo``: the same load by stock transformers and DeepSpeed, and by streaming, side by side.

Without a checkpoint it makes a small one, trains it in both ways, and resumes on another number of ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ...plugin_api import DISABLE, bytes_text, drop_from_cache, dtype_name, fill_cache, frame


EXAMPLE = "hf-zero-stream demo --checkpoint Qwen/Qwen3-0.6B --nproc 2"

ARMS = ("stock", "streaming")
STEPS = 3
"""Steps of the trainings of a checkpoint that is made here."""

_BAR = 48
"""Characters of the longest bar: with its name and its number it fits into 80 columns."""

_ROWS = {
    "bytes_read": "read from files, each rank (stock: pages of mapped files)",
    "anonymous_growth_bytes": "growth of anonymous host memory, each rank",
    "partition_bytes": "partitions, each rank",
}

_ON_A_CPU = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}

_QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


@dataclass(frozen=True)
class DemoTask:
    """The task of each rank of an arm; see :mod:`.demo_rank`."""

    folder: str
    model_class: str
    """Its name in transformers."""

    dtype: str
    config: dict[str, Any]
    """The DeepSpeed config."""

    loads: int
    """How often the checkpoint is loaded in each process; memory is that of the last load."""

    steps: int
    """Training steps after it."""

    results: str
    """The folder for what ranks write."""


def run(
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Your own: a folder, or the id of a repository in the Hub's cache."),
    ] = None,
    nproc: Annotated[int, typer.Option(min=1, help="Ranks to start on this machine.")] = 2,
    on: Annotated[
        Literal["auto", "cuda", "cpu"], typer.Option(help="Where ranks train; auto: GPUs where there are any.")
    ] = "auto",
    ds_config: Annotated[dict[str, Any] | None, frame.ds_config_option(3)] = None,
    dtype: frame.DtypeOption = None,
    cache: Annotated[
        Literal["warm", "cold"], typer.Option(help="Read the shards once before each load, or drop them.")
    ] = "warm",
    revision: frame.RevisionOption = None,
    keep: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep the checkpoint that it makes, in a new folder.")
    ] = None,
    html: frame.PageOption = None,
    form: frame.FormatOption = "table",
) -> None:
    """Compare stock and streaming on this machine.

    It makes a Qwen3-MoE of 0.15 GB, trains it for three steps in both ways, saves the training, and resumes it with
    one rank more; it compares time, memory, every parameter and every loss. With --checkpoint it loads that, and
    trains nothing. Each load has its own processes, started by torchrun; the first in a process pays for imports, ours
    too. Without --ds-config and --dtype it is in bf16. Exit code 1 if a check fails.
    """
    with frame.quiet():  # DeepSpeed would say on stdout which accelerator it finds
        from ...plugin_api import (
            accelerators,
            cached_folder,
            model_class_of,
            shards_of,
            transformers_errors,
            zero3,
        )

    gpus = accelerators.device_count() if accelerators.kind() == "cuda" else 0
    if on == "cuda" and gpus < nproc:
        raise typer.BadParameter(f"--on cuda: expected a GPU for each of {nproc} ranks (--nproc); torch finds {gpus}")
    if keep and (checkpoint or keep.exists()):
        raise typer.BadParameter(f"--keep: expected a new folder, and no --checkpoint; got {keep}")
    config = frame.config_with_dtype(ds_config, dtype if ds_config or dtype else "bf16")
    adamw = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}  # DeepSpeed's own would be compiled first
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": adamw, **config}
    with frame.quiet(), tempfile.TemporaryDirectory(prefix="hf-zero-stream-") as name:
        made = keep or Path(name, "qwen3-moe")
        folder = cached_folder(checkpoint, revision) if checkpoint else _make_checkpoint(made)
        loads, steps = (1, 0) if checkpoint else (2, STEPS)
        shards = shards_of(folder)[0]
        with transformers_errors(str(folder)):
            model_class = model_class_of(str(folder), {"trust_remote_code": False}).__name__
        dtype = dtype_name(zero3.partition_dtype(config))
        task = DemoTask(str(folder), model_class, dtype, config, loads, steps, name)
        arms: dict[str, dict[str, Any]] = {}
        for arm in ARMS:
            (drop_from_cache if cache == "cold" else fill_cache)(shards)
            _print_step(f"{arm}: {nproc} ranks load {folder.name}" + (f" and train {steps} steps" if steps else ""))
            arms[arm] = _run_arm(arm, task, nproc, on)
        resumed = None
        if steps and "error" not in arms["streaming"]:
            _print_step(f"resumed: {nproc + 1} ranks go on from what {nproc} have saved")
            resumed = _run_arm("resumed", task, nproc + 1, on)
            resumed["same_files"] = _same_files(Path(name, "saved"), Path(name, "again"))

    differing = _differing(arms)
    checks = _checks(arms, differing, resumed)
    shown = checkpoint or "a Qwen3-MoE made here"
    data = {"path": shown, "ranks": nproc, "cache": cache, "arms": arms, "resumed": resumed}
    data["same_bits"] = None if differing is None else not differing
    data["checks"] = [{"passed": passed, "what": what} for passed, what in checks]
    tables, bars = list(_tables(data)), list(_bars(arms))
    verdict = "\n".join(f"{'✓' if passed else '✗'} {what}" for passed, what in checks)
    if html and not any("error" in found for found in arms.values()):
        from ...plugin_api import write_page
        from .curves import memory_as_svg

        partition = max(arms["streaming"]["partition_bytes"])
        picture = memory_as_svg({arm: found["curves"] for arm, found in arms.items()}, partition)
        note = "Growth of anonymous host memory during from_pretrained: without mapped files and the page cache."
        write_page(html, f"hf_zero_stream: {shown}", picture, note, [*tables, verdict])
    for found in arms.values():
        found.pop("curves", None)  # hundreds of points
        found.pop("digests", None)
    frame.emit(data, [*tables, *bars, verdict], form, ok=all(passed for passed, _ in checks))


def _make_checkpoint(folder: Path) -> Path:
    """A Qwen3-MoE with random weights, as ``save_pretrained`` writes it: one tensor per expert."""
    import torch
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=1009,
        hidden_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=1536,
        moe_intermediate_size=384,
        num_experts=32,
        num_experts_per_tok=8,
        tie_word_embeddings=False,
    )
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="40MB")
    return folder


def _print_step(what: str) -> None:
    print(f"{what} ...", file=sys.stderr, flush=True)


def _run_arm(arm: str, task: DemoTask, nproc: int, on: str) -> dict[str, Any]:
    """Run the ranks of one arm; returns the figures of all, or the error of the first that failed."""
    results = Path(task.results)
    (results / "task.json").write_text(json.dumps(asdict(task)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    command = [*torchrun, "-m", "hf_zero_stream.plugins.demo.demo_rank", arm, str(results / "task.json")]
    code, printed = _launch(command, {**_QUIET, **os.environ, DISABLE: "0", **(_ON_A_CPU if on == "cpu" else {})})
    files = [results / f"{arm}-{number}.json" for number in range(nproc)]
    ranks = [json.loads(file.read_text()) for file in files if file.exists()]
    errors = [found["error"] for found in ranks if "error" in found]
    if errors or len(ranks) < nproc or code:
        return {"error": errors[0] if errors else f"exit code {code}:\n{printed.strip()[-2000:]}"}
    return {
        "seconds": [max(times) for times in zip(*(found["seconds"] for found in ranks), strict=True)],
        "losses": ranks[0]["losses"],
        **{key: [found[key] for found in ranks] for key in (*_ROWS, "digests", "curves")},
    }


def _launch(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """(exit code, what it printed) of a launcher."""
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as launcher:
        try:
            printed, _ = launcher.communicate()
        except BaseException:  # Ctrl-C: torchrun, if it were killed, would leave its ranks behind
            launcher.terminate()
            launcher.communicate()
            raise
    return launcher.returncode, printed


def _same_files(saved: Path, again: Path) -> bool:
    files = sorted(saved.glob("*.safetensors"))
    return bool(files) and all(
        (again / file.name).is_file() and (again / file.name).read_bytes() == file.read_bytes() for file in files
    )


def _differing(arms: Mapping[str, Mapping[str, Any]]) -> list[str] | None:
    """Names of the parameters of which a rank holds other bits; None if there is nothing to compare."""
    digests = [found.get("digests", [None]) for found in arms.values()]
    if any(of_rank is None for found in digests for of_rank in found):
        return None
    stock, streaming = digests
    names = {name for of_rank in (*stock, *streaming) for name in of_rank}
    return sorted(
        name for name in names if any(a.get(name) != b.get(name) for a, b in zip(stock, streaming, strict=True))
    )


def _checks(
    arms: Mapping[str, Mapping[str, Any]], differing: Sequence[str] | None, resumed: Mapping[str, Any] | None
) -> list[tuple[bool, str]]:
    """Whether it holds, and what was looked at; `differing` is what :func:`_differing` found."""
    found = [(False, f"the {arm} run failed: {it['error']}") for arm, it in arms.items() if "error" in it]
    if found:
        return found
    stock, streaming = arms["stock"], arms["streaming"]
    if differing is None:
        found.append((True, "the parameters are in swap files, and were not compared"))
    else:
        count = len(streaming["digests"][0])
        named = f"; DIFFERENT: {', '.join(differing[:8])}" if differing else ""
        found.append((not differing, f"{count - len(differing)} of {count} parameters equal, bit for bit{named}"))
    if resumed is None:
        return found
    *losses, last = streaming["losses"]
    found.append((streaming["losses"] == stock["losses"], f"{len(losses)} training steps: losses equal stock's"))
    if "error" in resumed:
        return [*found, (False, f"the resume failed: {resumed['error']}")]
    ranks = len(streaming["partition_bytes"])
    found.append(
        (
            resumed["same_files"] and resumed["losses"] == [last],
            f"saved by {ranks} ranks, resumed by {ranks + 1}: every weight and the next loss are equal",
        )
    )
    return found


def _tables(data: Mapping[str, Any]) -> Iterator[str]:
    arms = data["arms"]
    yield f"{data['path']}: {data['ranks']} ranks, page cache {data['cache']}"
    good = [found for found in arms.values() if "seconds" in found]
    titles = ("seconds, first load, with imports", "seconds, second load")
    rows = [
        (title, *(f"{found['seconds'][number]:.2f}" if "seconds" in found else "failed" for found in arms.values()))
        for number, title in enumerate(titles[: len(good[0]["seconds"]) if good else 1])
    ]
    for key, title in _ROWS.items():
        rows.append((title, *(_all_ranks(found[key]) if key in found else "failed" for found in arms.values())))
    losses = [found.get("losses", ()) for found in arms.values()]
    for step, values in enumerate(zip(*losses, strict=True) if len(good) == len(arms) else (), start=1):
        rows.append((f"loss, step {step}", *(f"{value:.6f}" for value in values)))
    yield frame.table(("", *ARMS), rows)


def _bars(arms: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Seconds and memory of both loads as bars, in plain characters: a log file shows them too."""
    if any("error" in found for found in arms.values()):
        return
    seconds = {arm: found["seconds"][-1] for arm, found in arms.items()}
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
