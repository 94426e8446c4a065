"""Who shares a host, and what disk: under each launcher, and where nobody can be asked.

- Who shares a host is asked of the ranks; what launchers announce is for a process that has nobody to ask.
- Under each launcher: ranks know who shares their host, and one that dies before a save is named within seconds.
- A shared disk, for which a FUSE file system stands: it is known as one, and what it gives is what the files hold.
"""

import os
import re
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import hf_zero_stream
from benchmarks.slow_disk import slow_folder
from hf_zero_stream import StreamingAutoModelForCausalLM
from hf_zero_stream.checkpoint.formats import map_from_headers
from hf_zero_stream.engine import host_part
from hf_zero_stream.engine.opened import OpenCheckpoint
from hf_zero_stream.ranks.coordinator import Coordinator
from hf_zero_stream.ranks.presence import Location, Presence, Topology
from hf_zero_stream.settings.config import (
    LOCAL_RANKS,
    LOCAL_SIZES,
    StreamingConfig,
    announced_local_rank,
    announced_local_size,
)
from hf_zero_stream.sources.local import is_on_network
from scripts.system_packages import FUSE, MPICH
from tests.conftest import skip_if_lacking
from tests.support.cluster import SOON_S, free_port, run_ranks, run_ranks_expecting_errors
from tests.support.commands import run_command
from tests.support.hosts import move_to_host
from tests.support.parity import ds_config, whole_values
from tests.support.zoo import Checkpoint


@pytest.mark.parametrize("name", LOCAL_SIZES)
def test_launchers_say_how_many_ranks_a_host_has(name: str) -> None:
    assert announced_local_size({}) == 1
    assert announced_local_size({name: "8"}) == 8
    assert announced_local_size({name: "8(x3)"}) == 8


@pytest.mark.parametrize("name", LOCAL_RANKS)
def test_launchers_number_the_ranks_of_a_host(name: str) -> None:
    assert announced_local_rank({}) == 0
    assert announced_local_rank({name: "5"}) == 5


def test_torch_s_launchers_come_before_those_around_them() -> None:
    """As torchrun in a batch script of Slurm's."""
    environ = {"SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "1", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    assert (announced_local_rank(environ), announced_local_size(environ)) == (3, 4)


@pytest.mark.parametrize(("hosts", "position", "first"), [("aabb", 1, 2), ("abab", 1, 1), ("abcd", 0, 3)])
def test_however_ranks_are_numbered(hosts: str, position: int, first: int) -> None:
    found = Topology(hosts, "xxxy" if hosts == "abcd" else "xxxx", 3)
    assert (found.position, found.ranks_of_host[0]) == (position, first)
    assert found.sharing_cores == (1 if hosts == "abcd" else 4)


def test_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = Topology.announced(3, 4)
    assert found.ranks_of_host == [2, 3] and found.position == 1 and found.sharing_cores == 2


def asked() -> tuple[list[int], int, bool]:
    """Ranks on two hosts, one of which has two containers with networks of their own."""
    rank = dist.get_rank()
    move_to_host("abab"[rank])
    real = Location.here
    if rank == 3:
        Location.here = classmethod(lambda cls, *args: real(*args)._replace(network="another"))  # type: ignore[method-assign]
    coordinator = Coordinator.of_default_group()
    with coordinator.watched():
        found = coordinator.topology
        presence = Presence.in_default_group()
        networks = {presence.location_of(other).network for other in found.ranks_of_host}  # type: ignore[union-attr]
        assert presence.watch is not None and not presence.watch.look(found.ranks_of_host)
        coordinator.agree()
    return found.ranks_of_host, found.sharing_cores, len(networks) == 1


@pytest.mark.plugin("watch")
def test_ranks_are_asked(cluster: None) -> None:
    assert run_ranks(4, asked) == [([0, 2], 4, True), ([1, 3], 4, False), ([0, 2], 4, True), ([1, 3], 4, False)]


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


@pytest.mark.plugin("watch", "relay")
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


needs_fuse = pytest.mark.skipif(
    not os.access("/dev/fuse", os.W_OK), reason="this system does not let FUSE be used (/dev/fuse)"
)


@pytest.mark.slow
@needs_fuse
def test_a_slow_shared_disk(tmp_path: Path) -> None:
    skip_if_lacking(FUSE)
    tensors = {"a": torch.randn(1000, 1100), "b": torch.arange(7)}
    save_file(tensors, tmp_path / "x.safetensors")
    with slow_folder(tmp_path, latency=5, rate=400) as place:
        assert is_on_network(str(place)) and not is_on_network(str(tmp_path))
        with closing(OpenCheckpoint(StreamingConfig(), Coordinator(0, 1, alone=True))) as checkpoint:
            paths = [str(place / "x.safetensors")]
            index = map_from_headers(paths, checkpoint.read_headers(paths))
            checkpoint.add(index.shards)
            assert checkpoint.threads() == 32
            slices = index.slices(checkpoint.materialise)
            for name, expected in tensors.items():
                assert torch.equal(slices[name][...].materialise(), expected)


def load_replicas(folder: str) -> None:
    with hf_zero_stream.streaming(StreamingConfig(progress=False, share_reads=True)):
        model = transformers.AutoModel.from_pretrained(folder)
        assert sum(rank.bytes_read for rank in model.streaming_report.ranks)


def load_partitions(folder: str) -> None:
    hf_zero_stream.StreamingAutoModel.from_pretrained(folder, ds_config=ds_config())


@needs_fuse
@pytest.mark.parametrize("load", [load_partitions, load_replicas])
def test_each_byte_crosses_the_wire_once_per_host(cluster: None, tmp_path: Path, load: Callable[[str], None]) -> None:
    """Two ranks whose parts lie side by side in each tensor; what the kernel asks the server for is counted."""
    skip_if_lacking(FUSE)
    folder, log = tmp_path / "model", tmp_path / "log"
    config = transformers.BertConfig(
        hidden_size=256, num_hidden_layers=6, num_attention_heads=2, intermediate_size=1024, vocab_size=1009
    )
    transformers.BertModel(config).save_pretrained(folder)
    size = (folder / "model.safetensors").stat().st_size
    with slow_folder(folder, latency=1, rate=1000, log=log) as place:
        run_ranks(2, load, str(place))
    asked = asked_for(log)
    assert size <= sum(asked) <= 1.02 * size, (size, asked)


def asked_for(log: Path) -> list[int]:
    """The bytes of each request of the kernel for the shard, whose headers it reads first."""
    lines = [line.split() for line in log.read_text().splitlines()]
    return [int(nbytes) for name, _, nbytes in lines if name == "model.safetensors"]


def load_on_two_hosts(folder: str, alone: bool) -> tuple[dict[str, torch.Tensor], int]:
    """All values, and what this rank brought into the page cache for its host of three."""
    move_to_host("aaabbb"[dist.get_rank()])
    brought, real = list[int](), host_part.bring_in

    def bring_in(*args: Any) -> int:
        brought.append(0 if alone else real(*args))
        return brought[-1]

    host_part.bring_in = bring_in
    model = hf_zero_stream.StreamingAutoModel.from_pretrained(folder, ds_config=ds_config())
    return whole_values(model), sum(brought)


@pytest.mark.slow
@needs_fuse
@pytest.mark.parametrize("keeps_cache", [True, False])
def test_a_part_of_a_host_is_read_at_once(cluster: None, tmp_path: Path, keeps_cache: bool) -> None:
    """Each of six ranks has little of each parameter; where opening a file drops what is cached, all stop at once."""
    skip_if_lacking(FUSE)
    folder = tmp_path / "model"
    sizes = {"hidden_size": 96, "intermediate_size": 768, "num_hidden_layers": 24, "vocab_size": 1009}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    plain = transformers.LlamaModel(transformers.LlamaConfig(**sizes, **heads))
    plain.save_pretrained(folder)
    requests, brought = {}, {}
    for alone in (True, False):
        log = tmp_path / f"log {alone}"
        with slow_folder(folder, latency=1, rate=1000, log=log, keeps_cache=keeps_cache) as place:
            ranks = run_ranks(6, load_on_two_hosts, str(place), alone, timeout=120)
        requests[alone], brought[alone] = len(asked_for(log)), [nbytes for _, nbytes in ranks]
        for values, _ in ranks:
            assert all(torch.equal(values[name], value) for name, value in plain.state_dict().items())
    assert not any(brought[True])
    if keeps_cache:
        assert all(brought[False]) and requests[False] < 0.9 * requests[True], (requests, brought)
    else:
        assert not any(brought[False]), brought
