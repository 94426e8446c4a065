"""The scripts that a reader begins with run on a CPU as their heads say: TRL with LoRA; the Trainer, preempted."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from benchmarks.clients.arms import FRAMEWORKS, environment_for, faults_of
from benchmarks.moe_checkpoint import make_moe_checkpoint
from tests.support.cluster import ROOT, free_port
from tests.support.commands import command_environment, documented_commands, link_repository, losses, run_command


TRL, RESUMED = ("finetune_trl.py", "finetune_resumed.py")
BATCH = ROOT / "examples" / "slurm" / "zero3.sbatch"


def commands(example: str) -> list[str]:
    source = (ROOT / "examples" / example).read_text()
    return documented_commands(source[: source.index('"""', 3)])


METHODS = commands(TRL)[2:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where commands run; with the model and the data that all of them use."""
    folder = tmp_path_factory.mktemp("examples")
    run_command("python examples/tiny.py", folder)
    return folder


@pytest.mark.parametrize("example", [TRL, RESUMED])
def test_head_shows_gpu_and_cpu_commands(example: str) -> None:
    on_gpu, make, *on_cpu = commands(example)
    assert "--model Qwen/" in on_gpu and make == "python examples/tiny.py"
    assert on_cpu and all("--model tiny-moe" in command for command in on_cpu)


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
@pytest.mark.parametrize("command", METHODS, ids=["sft", "dpo", "grpo"])
def test_trl_with_lora(command: str, folder: Path) -> None:
    saved = folder / f"adapters of {METHODS.index(command)}"
    streaming = run_command(command, folder, extra=["--output", str(saved)])
    assert "STREAMING LOAD REPORT (2 ranks" in streaming
    assert {name.split(".")[-2] for name in load_file(saved / "adapter_model.safetensors")} == {"lora_A", "lora_B"}
    stock = run_command(command, folder, extra=["--loader", "stock"])
    assert "STREAMING LOAD REPORT" not in stock
    assert len(losses(streaming)) == 3 and losses(streaming) == losses(stock)


SRUN = """\
#!{python}
import os, signal, subprocess, sys, time

tasks = []
for rank in range(int(os.environ["SLURM_NTASKS"])):
    own = {{"SLURM_PROCID": str(rank), "SLURM_LOCALID": "0", "SLURM_NODEID": str(rank)}}
    tasks.append(subprocess.Popen(sys.argv[1:], env=os.environ | own))

def pass_on(*_):
    for task in tasks:
        task.send_signal(signal.SIGTERM)
        time.sleep(2.5)  # more than two steps

signal.signal(signal.SIGTERM, pass_on)
open("srun.pid", "w").write(str(os.getpid()))
sys.exit(max(task.wait() for task in tasks))
"""

SCONTROL = """\
#!/bin/sh
case $1 in
    show) echo 127.0.0.1 ;;
    requeue) echo "requeued $2" ;;
esac
"""

ON_A_HOST = """\
import os
if "SLURM_NODEID" in os.environ and "RANK" in os.environ:
    from tests.support.hosts import move_to_host
    move_to_host("node" + os.environ["SLURM_NODEID"])
"""


def batch(folder: Path, options: str) -> "subprocess.Popen[str]":
    """`zero3.sbatch` as a job of two machines, each with one rank on a CPU."""
    environment = command_environment([folder / "site"])
    environment |= {"PATH": f"{folder / 'bin'}{os.pathsep}{environment['PATH']}", "MASTER_PORT": str(free_port())}
    environment |= {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0-1]"}
    command = ["bash", str(BATCH), "--model", "tiny-moe", "--data", "texts", *shlex.split(options)]
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def measured(output: str) -> list[str]:
    return re.findall(r"^(step \d+: (?:eval_)?loss \S+)$", output, re.MULTILINE)


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
def test_a_preempted_run_is_that_of_one_which_was_not(folder: Path) -> None:
    """On two hosts, by the script for Slurm; the signal reaches the ranks in different steps."""
    link_repository(folder)
    for place, text in {"bin/srun": SRUN.format(python=sys.executable), "bin/scontrol": SCONTROL}.items():
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_text(text)
        (folder / place).chmod(0o755)
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(ON_A_HOST)

    whole = batch(folder, "--output whole --steps 12")
    expected, _ = whole.communicate(timeout=400)
    assert whole.returncode == 0 and len(measured(expected)) == 12 + 3 and "ready" in expected.split(), expected

    preempted = batch(folder, "--output cut --steps 12 --seconds-per-step 1")
    until = time.monotonic() + 300
    while not (folder / "cut" / "checkpoint-4" / "trainer_state.json").exists() and time.monotonic() < until:
        time.sleep(0.1)
    os.kill(int((folder / "srun.pid").read_text()), signal.SIGTERM)
    output, _ = preempted.communicate(timeout=400)
    assert preempted.returncode == 0 and "requeued 7" in output and "ready" not in output.split(), output
    step = int(re.findall(r"^stopped at step (\d+)$", output, re.MULTILINE)[0])
    assert 4 < step < 12 and (folder / "cut" / f"checkpoint-{step}").is_dir()

    resumed = batch(folder, "--output cut --steps 12")
    output, _ = resumed.communicate(timeout=400)
    assert resumed.returncode == 0 and "requeued" not in output, output
    assert re.search(rf"^began at .*checkpoint-{step}$", output, re.MULTILINE)
    assert measured(output) == measured(expected)
    assert (folder / "cut" / "model.safetensors").read_bytes() == (folder / "whole" / "model.safetensors").read_bytes()


def test_the_batch_script_is_one() -> None:
    text = BATCH.read_text()
    assert subprocess.run(["bash", "-n", BATCH], capture_output=True).returncode == 0
    assert {"--requeue", "--signal=TERM@300"} <= set(re.findall(r"^#SBATCH (\S+)", text, re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["lightning", "ray"])
def test_examples_of_frameworks(tmp_path: Path, framework: str) -> None:
    """In an environment of the framework's own, with and without us: the same losses, values and files."""
    make_moe_checkpoint(tmp_path / "model", 1e6, num_layers=2, num_experts=4)
    name = f"{framework}_example"
    faults, _ = faults_of(name, FRAMEWORKS[framework].clients[name], environment_for(framework), tmp_path)
    assert faults == []
