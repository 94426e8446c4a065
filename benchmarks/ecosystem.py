"""Tools that people drive by YAML, and frameworks, with and without `hf_zero_stream.run`.

    python -m benchmarks.ecosystem                     # all of them, each installed into a venv of its own
    python -m benchmarks.ecosystem llamafactory ray    # some of them
    python -m benchmarks.ecosystem --megabytes 100     # for the tools

Each tool trains a Qwen3-MoE with random weights under ZeRO-3 for three steps, on two ranks of a CPU, by its config in
examples/: the same losses; seconds and memory. Frameworks are run by benchmarks/clients: the same losses and files,
and checkpoints that are resumed. The exit code is 1 if a run fails, if anything differs, or if the run that should
stream does not.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.clients.arms import FRAMEWORKS, HEADER, compare, make_encoder
from benchmarks.moe_checkpoint import make_moe_checkpoint
from benchmarks.venvs import ROOT, environment_of, venv_of, versions_in


STREAMS = "Streaming weights: 100%"


class Tool(NamedTuple):
    """What is installed, and the module that the tool's own command line would start."""

    package: str
    module: str
    config: str

    def arguments(self) -> list[str]:
        """What follows the module on the command line."""
        return [self.config] if self.config.endswith(".yaml") else (ROOT / self.config).read_text().split()


TOOLS = {
    "llamafactory": Tool("llamafactory==0.9.5", "llamafactory.launcher", "examples/llamafactory/sft.yaml"),
    "swift": Tool("ms-swift==4.6.0", "swift.cli.sft", "examples/swift/sft.args"),
}
SHOWN = ("transformers", "accelerate", "trl", "deepspeed")


def make_inputs(folder: Path, megabytes: float) -> None:
    """A checkpoint with a tokenizer of a few words, and a data set that both tools read."""
    from tests.support.trainers import make_tokenizer

    make_moe_checkpoint(folder / "tiny-moe", megabytes * 1e6, num_layers=4, num_experts=16)
    make_tokenizer(folder / "tiny-moe")
    (folder / "texts").mkdir()
    said = {
        "messages": [{"role": "user", "content": "a small"}, {"role": "assistant", "content": "model learns words"}]
    }
    (folder / "texts" / "train.jsonl").write_text(f"{json.dumps(said)}\n" * 8)
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    described = {
        "file_name": "train.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": tags,
    }
    (folder / "texts" / "dataset_info.json").write_text(json.dumps({"texts": described}))
    (folder / "examples").symlink_to(ROOT / "examples")


def train(tool: Tool, venv: Path, folder: Path, *, streams: bool) -> dict[str, Any]:
    """One run; returns its losses, its seconds, and the most anonymous memory that a rank had."""
    ours = ["-m", "hf_zero_stream.run"] if streams else []
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [
        str(venv / "bin" / "python"),
        *torchrun,
        *ours,
        "-m",
        "benchmarks.on_cpu",
        tool.module,
        *tool.arguments(),
    ]
    shutil.rmtree(folder / "trained", ignore_errors=True)
    began = time.perf_counter()
    with open(folder / "log", "w+") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment_of(venv), stdout=log, stderr=subprocess.STDOUT)
        peak = _watch(process)
        log.seek(0)
        output = log.read()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{output[-4000:]}")
    return {
        "losses": re.findall(r"'loss': '?([\d.]+)", output),
        "streamed": STREAMS in output,
        "seconds": time.perf_counter() - began,
        "anonymous_bytes": peak,
    }


def _watch(process: "subprocess.Popen[bytes]") -> int:
    """Waits for the end; returns the most anonymous memory that any process below had, in bytes."""
    most, ended = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.1):
            try:
                for child in psutil.Process(process.pid).children(recursive=True):
                    memory = child.memory_info()
                    most = max(most, memory.rss - memory.shared)
            except psutil.NoSuchProcess:
                continue

    thread = threading.Thread(target=watch)
    thread.start()
    process.wait()
    ended.set()
    thread.join()
    return most


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train with tools of others, with and without hf_zero_stream.run.")
    names = [*TOOLS, *FRAMEWORKS]
    parser.add_argument("tools", nargs="*", default=names, help=", ".join(names))
    parser.add_argument("--megabytes", type=float, default=50)
    settings = parser.parse_args(arguments)
    failed, lines = False, []
    for name in [name for name in settings.tools if name in TOOLS]:
        venv = venv_of(name, [TOOLS[name].package])
        with tempfile.TemporaryDirectory(prefix="ecosystem-") as folder:
            make_inputs(Path(folder), settings.megabytes)
            stock, ours = (train(TOOLS[name], venv, Path(folder), streams=streams) for streams in (False, True))
        equal = len(stock["losses"]) >= 3 and stock["losses"] == ours["losses"]
        failed |= not equal or stock["streamed"] or not ours["streamed"]
        memory = " | ".join(f"{found['anonymous_bytes'] / 2**20:.0f} MiB" for found in (stock, ours))
        seconds = " | ".join(f"{found['seconds']:.1f} s" for found in (stock, ours))
        losses = f"equal: {', '.join(stock['losses'])}" if equal else f"{stock['losses']}, {ours['losses']}"
        lines.append(f"| {TOOLS[name].package}, {versions_in(venv, SHOWN)} | {losses} | {seconds} | {memory} |")
    if lines:
        print("\n| tool | losses | stock | streaming | memory of a rank, stock | streaming |")
        print("\n".join(["|---|---|--:|--:|--:|--:|", *lines]))
    with tempfile.TemporaryDirectory(prefix="ecosystem-") as folder:
        make_moe_checkpoint(Path(folder) / "model", 1e6, num_layers=2, num_experts=4)
        make_encoder(Path(folder) / "encoder")
        lines, differs = compare([name for name in settings.tools if name in FRAMEWORKS], Path(folder))
    if lines:
        print("\n".join(["", HEADER, *lines]))
    return int(failed or differs)


if __name__ == "__main__":
    sys.exit(main())
