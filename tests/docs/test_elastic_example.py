"""`finetune_elastic.py` under torchrun on three simulated machines: one is killed, two go on, and it comes back."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.cluster import ROOT, free_port
from tests.support.commands import command_environment, documented_commands, link_repository, run_command
from tests.support.hosts import can_mount


EXAMPLE = (ROOT / "examples" / "finetune_elastic.py").read_text()
ON_GPU, MAKE, ON_CPU = documented_commands(EXAMPLE[: EXAMPLE.index('"""', 3)])
NEEDS = re.findall(r"(TORCH_\w+)=(\d)", EXAMPLE)
STEPS = 40


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
def test_on_two_processes(tmp_path: Path) -> None:
    run_command(MAKE, tmp_path)
    (tmp_path / "memory").mkdir()
    printed = run_command(ON_CPU, tmp_path, extra=["--memory", str(tmp_path / "memory")])
    assert "goes on from tiny-moe" in printed and "2 ranks, step 8: loss" in printed and "ready" in printed
    assert [*(tmp_path / "memory").rglob("state-*")] == [] and (tmp_path / "run1" / "model.safetensors").exists()


class Machines:
    """Three machines, each a process with a name, and a memory that others do not see and that goes with it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.endpoint = folder, f"127.0.0.1:{free_port()}"
        (folder / "memory").mkdir()
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        """Start the example, as its head says, on a machine."""
        begin, end = ON_GPU.index("examples/"), ON_GPU.index("--model")
        options = "--rdzv_conf last_call_timeout=2,join_timeout=120,keep_alive_interval=1,keep_alive_max_attempt=3"
        # torchrun tells machines apart by their addresses and process ids, of which each has the same here.
        options += f" --nproc_per_node 1 --monitor-interval 0.3 --local-addr 127.0.0.{'abc'.index(name) + 2}"
        launcher = ON_GPU[:begin].replace("--nproc_per_node 8", options)
        launcher = launcher.replace("FIRST_MACHINE:29500", self.endpoint)
        script = f"{ON_GPU[begin:end]} --model tiny-moe --data texts --output run1 --memory memory"
        script += f" --every 1 --steps {STEPS} --seconds-per-step 0.7"
        inside = f"hostname {name} && mount -t tmpfs tmpfs memory && exec {launcher} {script}"
        log = open(self.folder / f"log-{name}", "ab")
        self.running[name] = subprocess.Popen(
            ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", inside],
            cwd=self.folder,
            env={**command_environment(), **dict(NEEDS)},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def kill(self, name: str) -> None:
        """Kill all of a machine at once: with its first process the kernel ends all others of it."""
        os.killpg(self.running[name].pid, signal.SIGKILL)
        self.running.pop(name).wait()

    def printed(self) -> list[str]:
        """The lines that rank 0 printed, wherever it was."""
        found = []
        for log in self.folder.glob("log-*"):
            found += re.findall(r"^(?:goes on from .*|\d ranks, step .*|ready)$", log.read_text(), re.MULTILINE)
        return found

    def wait_for(self, pattern: str, seconds: float = 240) -> float:
        """Wait until rank 0 has printed such a line; the time that it took."""
        began = time.monotonic()
        while not any(re.search(pattern, line) for line in self.printed()):
            logs = "".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in self.folder.glob("log-*"))
            assert time.monotonic() - began < seconds, f"{pattern} did not come:\n{logs}"
            time.sleep(0.1)
        return time.monotonic() - began


@pytest.mark.usefixtures("compiler")
@pytest.mark.skipif(not can_mount(), reason="mounting in a namespace of its own is not allowed here")
@pytest.mark.slow
def test_a_machine_is_killed_and_comes_back(tmp_path: Path) -> None:
    run_command(MAKE, tmp_path)
    link_repository(tmp_path)
    machines = Machines(tmp_path)
    try:
        for name in "abc":
            machines.start(name)
            if name == "a":
                time.sleep(3)  # the first one holds torchrun's store
        machines.wait_for(r"^3 ranks, step 3:")
        time.sleep(random.uniform(0, 2))
        machines.kill(random.choice("bc"))
        machines.wait_for(r"^2 ranks, step")
        gone = next(name for name in "bc" if name not in machines.running)
        time.sleep(3)
        machines.start(gone)
        machines.wait_for("ready")
        for process in machines.running.values():
            assert process.wait(120) == 0
    finally:
        for name in [*machines.running]:
            with suppress(ProcessLookupError):  # it has come to its end
                machines.kill(name)
    lines = machines.printed()
    resumed = [line for line in lines if line.startswith("goes on from memory/")]
    assert len(resumed) >= 2, lines
    assert any(line.startswith(f"3 ranks, step {STEPS}") for line in lines), lines
    assert [path.name for path in (tmp_path / "run1").glob("checkpoint-*")] == [f"checkpoint-{STEPS}"]  # at its end
    # Of a step that was made twice, by other numbers of ranks or in another life, the loss is nearly the same.
    of_step: dict[str, set[float]] = {}
    for number, loss in re.findall(r"ranks, step (\d+): loss (\S+)", "\n".join(lines)):
        of_step.setdefault(number, set()).add(round(float(loss), 3))
    assert len(of_step) == STEPS
    assert all(max(losses) - min(losses) < 0.01 for losses in of_step.values()), of_step
