"""Import this before torch: from then on ``torch.cuda`` is there, of paper.

Set before that: PAPER_GPUS, how many devices (2; none with ``CUDA_VISIBLE_DEVICES=""``, as in a build of torch for
CUDA on a machine without a GPU); PAPER_GPU_MIB, the memory of each (4096); PAPER_GPU_LAG_US, how far streams lag
behind on average (100).
"""

import ctypes
import importlib.util
import os
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from .build import NAME, build


assert "torch" not in sys.modules, "import tests.paper_gpu.cuda before torch, which asks once whether there is CUDA"
if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
    os.environ["PAPER_GPUS"] = "0"
_library = build()
ctypes.CDLL(str(_library), ctypes.RTLD_GLOBAL)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed import constants, device_mesh, distributed_c10d  # noqa: E402


_spec = importlib.util.spec_from_file_location(NAME, _library)
assert _spec is not None and _spec.loader is not None
paper = importlib.util.module_from_spec(_spec)
"""The compiled module, which also says what it has seen: ``faults``, ``traffic``, ``contexts``, ``pinned``."""
_spec.loader.exec_module(paper)


def _index(device: Any = None) -> int:
    index = device if device is None or isinstance(device, int) else torch.device(device).index
    return paper.current_device() if index is None else index


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, device=torch.device("cuda", _index(device)), priority=priority)

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(Stream.record_event(stream))

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def __hash__(self) -> int:
        return hash((self.stream_id, self.device_index))


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(cls, "cuda", enable_timing=enable_timing)

    def record(self, stream: Any = None) -> None:
        super().record(current_stream() if stream is None else stream)

    def wait(self, stream: Any = None) -> None:
        super().wait(current_stream() if stream is None else stream)


class StreamContext:
    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.before = current_stream(), current_stream(self.stream.device_index)
            _set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            here, there = self.before
            _set_stream(there)
            _set_stream(here)


def current_stream(device: Any = None) -> Stream:
    index = _index(device)
    return Stream(stream_id=paper.current_stream_id(index), device_index=index, device_type=1)


def default_stream(device: Any = None) -> Stream:
    return Stream(stream_id=0, device_index=_index(device), device_type=1)


def _set_stream(stream: Any) -> None:
    torch._C._accelerator_setStream(stream)


def _exchange_device(index: int) -> int:
    before: int = paper.current_device()
    if index >= 0:
        paper.set_device(index)
    return before


def _exchange_if_used(index: int) -> int:
    """As CUDA's: makes no context on a device only to come back to it."""
    return _exchange_device(index) if index in paper.contexts() else paper.current_device()


def _init() -> None:
    if not paper.device_count():
        raise RuntimeError("Found no NVIDIA driver on your system. (The paper GPU, with no devices.)")


def _set_device(device: Any) -> None:
    if _index(device) >= 0:
        paper.set_device(_index(device))


def _memory(figure: str) -> Any:
    return lambda device=None: paper.memory(_index(device))[figure]


def _memory_stats(device: Any = None) -> dict[str, int]:
    seen = paper.memory(_index(device))
    named = {"allocated": "allocated", "active": "allocated", "reserved": "reserved"}
    stats = {f"{name}_bytes.all.current": seen[figure] for name, figure in named.items()}
    peaks = {"allocated_bytes.all.peak": seen["peak"], "active_bytes.all.peak": seen["peak"]}
    return {**stats, **peaks, "reserved_bytes.all.peak": seen["reserved"], "num_alloc_retries": 0, "num_ooms": 0}


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="paper GPU",
        major=9,
        minor=0,
        multi_processor_count=132,
        total_memory=paper.capacity(),
        shared_memory_per_block_optin=232448,
        warp_size=32,
        L2_cache_size=50 << 20,
        gcnArchName="",
        uuid="paper",
    )


def _install_runtime() -> None:
    """What torch.cuda asks of the C++ that a build for CUDA has."""
    for name, function in {
        "getDeviceCount": paper.device_count,
        "init": _init,
        "getDevice": paper.current_device,
        "setDevice": paper.set_device,
        "isInBadFork": paper.is_forked,
        "synchronize": lambda: paper.synchronize(paper.current_device()),
        "emptyCache": paper.empty_cache,
        "ipc_collect": lambda: None,
        "getCompiledVersion": lambda: 13000,
        "clearCublasWorkspaces": lambda: None,
        "getCurrentRawStream": paper.current_stream_id,
        "getCurrentStream": lambda index: (paper.current_stream_id(index), index, 1),
        "setStream": lambda **which: _set_stream(Stream(**which)),
        "isCurrentStreamCapturing": lambda: False,
    }.items():
        setattr(torch._C, f"_cuda_{name}", function)


def _install_cuda() -> None:
    """What torch.cuda itself can answer only in a build for CUDA."""
    cuda = torch.cuda
    cuda._queued_calls.clear()
    runtime = SimpleNamespace(
        cudaProfilerStart=lambda: 0, cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0
    )
    for name, value in {
        "_is_in_bad_fork": paper.is_forked,
        "_cudart": runtime,
        "_exchange_device": _exchange_device,
        "_maybe_exchange_device": _exchange_if_used,
        "default_generators": tuple(paper.generator(index) for index in range(paper.device_count())),
        "is_current_stream_capturing": lambda: False,
        "Stream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": _set_stream,
        "set_device": _set_device,
        "synchronize": lambda device=None: paper.synchronize(_index(device)),
        "device_count": paper.device_count,
        "is_available": lambda: paper.device_count() > 0,
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_device_name": lambda device=None: "paper GPU",
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": _properties,
        "can_device_access_peer": lambda *_: True,
        "mem_get_info": lambda device=None: (
            paper.capacity() - paper.memory(_index(device))["reserved"],
            paper.capacity(),
        ),
    }.items():
        setattr(cuda, name, value)
    cuda.streams.Stream, cuda.streams.Event = Stream, Event
    for module in (cuda, cuda.memory):
        for name, value in {
            "memory_stats": _memory_stats,
            "memory_stats_as_nested_dict": lambda device=None: {},
            "memory_allocated": _memory("allocated"),
            "max_memory_allocated": _memory("peak"),
            "memory_reserved": _memory("reserved"),
            "max_memory_reserved": _memory("reserved"),
            "reset_peak_memory_stats": lambda device=None: paper.reset_peak(_index(device)),
            "reset_max_memory_allocated": lambda device=None: paper.reset_peak(_index(device)),
            "empty_cache": paper.empty_cache,
        }.items():
            setattr(module, name, value)
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        setattr(cuda.nvtx, name, lambda *_, **__: 0)
    torch.version.cuda = "13.0"
    torch.backends.cuda.is_built = lambda: True


def _install_storages() -> None:
    resize, to = torch.UntypedStorage.resize_, torch.storage._StorageBase.to

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        return paper.resize_storage(torch.empty(0, dtype=torch.uint8, device=self.device).set_(self), size)

    def moved(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
        device = torch.device(device)
        if device.type != "cuda" or self.device.type != "cpu":
            return to(self, device=device, non_blocking=non_blocking)
        there = torch.empty(self.size(), dtype=torch.uint8, device=device).untyped_storage()
        return there.copy_(self, non_blocking)

    def to_cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
        return moved(self, device=torch.device("cuda", _index(device)), non_blocking=non_blocking)

    torch.UntypedStorage.resize_ = resize_
    torch.storage._StorageBase.to = torch.UntypedStorage.to = moved
    torch.UntypedStorage.cuda = to_cuda


def _install_nccl() -> None:
    group = paper.ProcessGroupNCCL
    group.Options = paper.Options
    distributed_c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = group
    distributed_c10d._NCCL_AVAILABLE = True
    timeout = timedelta(minutes=10)
    constants.default_pg_nccl_timeout = distributed_c10d.default_pg_nccl_timeout = timeout
    torch.cuda.nccl.version = lambda: (2, 28, 0)
    torch.cuda.nccl.is_available = lambda tensors=None: True
    distributed_c10d.split_group = dist.split_group = device_mesh.split_group = _split_group


def _split_group(parent_pg: Any = None, split_ranks: Any = None, timeout: Any = None, **others: Any) -> Any:
    """As NCCL splits a communicator: the groups are new ones here."""
    mine = None
    for ranks in split_ranks:
        group = dist.new_group(ranks, timeout=timeout, group_desc=others.get("group_desc"))
        if dist.get_rank() in ranks:
            mine = group
    return mine


_install_runtime()
_install_cuda()
_install_storages()
_install_nccl()
