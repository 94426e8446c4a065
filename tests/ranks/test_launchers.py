"""Under each launcher: ranks know who shares their host, and one that dies before a save is named within seconds."""

import os
import re
import sys
from pathlib import Path

import deepspeed
import pytest
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from hf_zero_stream import StreamingAutoModelForCausalLM
from scripts.system_packages import MPICH
from tests.conftest import skip_if_lacking
from tests.support.cluster import SOON_S, free_port, run_ranks_expecting_errors
from tests.support.commands import run_command
from tests.support.zoo import Checkpoint


RANK = """
import os
import signal
import sys
import time

environ = os.environ
if "PMI_RANK" in environ:  # as users of MPICH do, because deepspeed wants these
    environ |= {"RANK": environ["PMI_RANK"], "WORLD_SIZE": environ["PMI_SIZE"], "MASTER_ADDR": "127.0.0.1"}
    environ |= {"LOCAL_RANK": environ["MPI_LOCALRANKID"], "MASTER_PORT": sys.argv[4]}
    from tests.support.hosts import move_to_host

    move_to_host(f"node{int(environ['RANK']) % 2}")  # as --map-by node numbers them
import torch.distributed as dist

dist.init_process_group("gloo")
import hf_zero_stream
from hf_zero_stream import StreamingAutoModelForCausalLM

rank, victim, opened, real_open = dist.get_rank(), int(sys.argv[3]), [], os.open
os.open = lambda path, *rest, **kwargs: opened.append(str(path)) or real_open(path, *rest, **kwargs)
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
config["hf_zero_stream"] = {"read_from": "local_rank0", "progress": False}
model = StreamingAutoModelForCausalLM.from_pretrained(sys.argv[1], ds_config=config)
reads = any(path.endswith(".safetensors") for path in opened)
print(f"\\nrank {rank} of {model.streaming_report.world_size}: reads={reads}", flush=True)
dist.barrier()
if rank == victim:
    os.kill(os.getpid(), signal.SIGKILL)
    os._exit(9)  # the first process of a namespace cannot kill itself
began = time.monotonic()
try:
    hf_zero_stream.save_pretrained(model, sys.argv[2])
except hf_zero_stream.errors.PeerError as error:
    print(f"\\nrank {rank} after {time.monotonic() - began:.0f} s: {error}", flush=True)
os._exit(0)
"""

# The launcher must not see the death, or it would end the other ranks itself. Where it may, it gives each rank of the
# second host a namespace of process numbers of its own, as containers have.
SHIELD = """
import os
import subprocess
import sys

command = [sys.executable, "rank.py", *[word for word in sys.argv[1:] if not word.startswith("--local_rank")]]
container = ["unshare", "--pid", "--fork", "--mount-proc"]
if int(os.environ.get("PMI_RANK", "0")) % 2:
    may = subprocess.run([*container, "true"], capture_output=True).returncode == 0
    command = [*container, *command] if may else command
subprocess.run(command)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "world_size", "victim", "readers"),
    [
        ("torchrun --nproc-per-node 2", 2, 1, [0]),
        ("deepspeed --num_accelerators 2", 2, 0, [0]),
        ("mpirun.mpich -n 4 python", 4, 1, [0, 1]),
    ],
    ids=["torchrun", "deepspeed", "mpirun"],
)
def test_a_death_before_a_save(
    cluster: None,
    zoo_checkpoint: Checkpoint,
    tmp_path: Path,
    launcher: str,
    world_size: int,
    victim: int,
    readers: list[int],
) -> None:
    """Under deepspeed and mpirun, rank 0's process holds torch's store, and the store dies with it.

    Under mpirun the ranks of the second host do not see anybody's process: the kernel answers for them.
    """
    if launcher.startswith("mpirun"):
        skip_if_lacking(MPICH)
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "shield.py").write_text(SHIELD)
    arguments = f"{zoo_checkpoint('qwen3_moe')} {tmp_path / 'saved'} {victim} {free_port()}"
    printed = run_command(f"{launcher} shield.py {arguments}", tmp_path)
    for rank in range(world_size):
        assert f"rank {rank} of {world_size}: reads={rank in readers}" in printed, printed
    found = re.findall(rf"rank (\d) after (\d+) s: rank {victim} has died", printed)
    assert sorted(int(rank) for rank, _ in found) == [rank for rank in range(world_size) if rank != victim], printed
    assert all(int(seconds) < SOON_S for _, seconds in found)


def load_without_a_launcher(folder: Path) -> None:
    dist.destroy_process_group()
    deepspeed.comm.comm.cdb = None
    sys.modules["mpi4py"] = None  # type: ignore[assignment]  # where it is installed
    tiny = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9)
    LlamaForCausalLM(LlamaConfig(**tiny)).save_pretrained(folder)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    StreamingAutoModelForCausalLM.from_pretrained(folder, ds_config=config)


def test_no_launcher(cluster: None, tmp_path: Path) -> None:
    """DeepSpeed would ask mpi4py, which is seldom there, and raise its ModuleNotFoundError."""
    (outcome,) = run_ranks_expecting_errors(1, load_without_a_launcher, tmp_path)
    assert outcome.error_type == "ConfigError" and outcome.error_message is not None, outcome
    assert re.search("RANK, WORLD_SIZE, .* are not set. Start it with `torchrun", outcome.error_message)
