"""Programs that end while a state is saved in the background: the save comes to its end, or says that it did not."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.cluster import free_port
from tests.support.commands import command_environment
from tests.support.forks import Forks


PROGRAM = """
import os
import sys
import threading
import time

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import hf_zero_stream

folder, ending = sys.argv[-2:]
dist.init_process_group("gloo")
tiny = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**tiny))
optimizer = torch.optim.AdamW(model.parameters())
hf_zero_stream.save_state(model, folder, optimizer=optimizer)
write = os.pwritev


def write_when_the_program_ends(*arguments):
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    if ending == "failure" and dist.get_rank() == 1:
        raise OSError(28, "No space left on device")
    return write(*arguments)


os.pwritev = write_when_the_program_ends
how = {"asynchronous": True, "snapshot_bytes": "all"}  # so that values may be changed
saved = hf_zero_stream.save_state(model, folder, optimizer=optimizer, tag="last", **how)
with torch.no_grad():
    for param in model.parameters():
        param.fill_(7)  # the bytes are those of the call
assert not saved.done
if ending == "destroyed":
    dist.destroy_process_group()
if ending == "exit":
    sys.exit(3)
if ending == "error" or (ending == "error of rank 1" and dist.get_rank() == 1):
    raise RuntimeError("the training has failed")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "ending"),
    [
        ("deepspeed", "exit"),
        ("torchrun", "failure"),
        ("torchrun", "end"),
        ("deepspeed", "end"),
        ("deepspeed", "destroyed"),
        ("torchrun", "destroyed"),
        ("torchrun", "error"),
        ("deepspeed", "error"),
        ("torchrun", "error of rank 1"),
        ("deepspeed", "failure"),
    ],
)
def test_a_program_ends(tmp_path: Path, launcher: str, ending: str) -> None:
    """Under torchrun the store is the launcher's; under deepspeed it is in the process of rank 0, which ends too."""
    (tmp_path / "program.py").write_text(PROGRAM)
    options = {"torchrun": ["--standalone", "--nproc-per-node", "2"], "deepspeed": ["--num_accelerators", "2"]}[
        launcher
    ]
    if launcher == "deepspeed":
        options += ["--master_port", str(free_port())]
    done = subprocess.run(
        [launcher, *options, "program.py", str(tmp_path / "state"), ending],
        cwd=tmp_path,
        env=command_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    check(tmp_path, ending, done.returncode, done.stdout)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks("import torch, transformers.modeling_utils", environment=command_environment()) as forks:
        yield forks


@pytest.mark.parametrize("ending", ["failure", "error"])
def test_a_program_without_a_launcher_ends(forks: Forks, tmp_path: Path, ending: str) -> None:
    """The store is in the process of rank 0."""
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [forks.start(PROGRAM, str(tmp_path / "state"), ending, **group, RANK=str(rank)) for rank in range(2)]
    codes, *printed = zip(*(rank.ended() for rank in ranks), strict=True)
    check(tmp_path, ending, max(codes), "\n".join(text for of_ranks in printed for text in of_ranks))


def check(tmp_path: Path, ending: str, code: int, printed: str) -> None:
    said = "A save in the background has failed" in printed
    assert said == (ending == "failure"), printed
    assert (code == 0) == (ending in ("end", "destroyed", "failure")), printed
    newest = (tmp_path / "state" / "latest").read_text()
    assert newest == ("global_step0" if ending == "failure" else "last"), printed
    assert not list((tmp_path / "state").glob(".*")) or ending == "failure"
    states = [path.name for path in (tmp_path / "state").iterdir() if (path / "training_state.json").exists()]
    assert newest in states and len(states) == (1 if ending == "failure" else 2)
    weights = load_file(tmp_path / "state" / "model.safetensors")
    assert not any((value == 7).all() for value in weights.values())
