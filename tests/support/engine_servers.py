"""Servers with the routes of vLLM's and SGLang's for new weights: they note each call, and take what is broadcast.

What they may be asked, in which order and with which fields, is read from vllm 0.32 and sglang 0.5.23. A call that
the real one would not take is answered with 400. For faults, a route may be given another answer.
"""

import json
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,
    _unregister_process_group,
    _world,
    rendezvous,
)

from hf_zero_stream.plugins.stream.receiver import Receiver


T = TypeVar("T")

Answer = Callable[[], tuple[int, Any]]

TIMEOUT = timedelta(seconds=60)


class EngineServer:
    """Listens until it is closed. `calls`: path and body of each; `updates`: the tensors of each finished update."""

    alive = ""

    def __init__(self, checkpoint: str, faults: dict[str, Answer] | None = None) -> None:
        self.checkpoint, self.faults = checkpoint, faults or {}
        self.calls: list[tuple[str, Any]] = []
        self.updates: list[dict[str, torch.Tensor]] = []
        self._arrived: dict[str, torch.Tensor] = {}
        self._group: Any = None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(None)

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self._answer(json.loads(data) if data else None)

            def _answer(self, body: Any) -> None:
                path = self.path.removeprefix("/")
                if path != outer.alive:
                    outer.calls.append((path, body))
                try:
                    status, found = outer.faults.get(path, lambda: (200, outer.answer(path, body)))()
                except Exception as error:
                    status, found = 400, {"error": repr(error)}
                data = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, body: Any) -> Any:
        raise NotImplementedError

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def take(self, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> None:
        """One broadcast: these tensors, one after the other."""
        empty = [
            torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            for dtype, shape in zip(dtypes, shapes, strict=True)
        ]
        sizes = [each.nbytes for each in empty]
        packed = torch.empty(sum(sizes), dtype=torch.uint8)
        self.receive(packed)
        for name, like, piece in zip(names, empty, packed.split(sizes), strict=True):
            assert name not in self._arrived, f"{name} comes twice"
            self._arrived[name] = piece.view(like.dtype).view(like.shape).clone()

    def receive(self, packed: torch.Tensor) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        self.updates.append(self._arrived)
        self._arrived = {}


class VLLMServer(EngineServer):
    alive = "health"

    def answer(self, path: str, body: Any) -> Any:
        match path:
            case "v1/models":
                return {"data": [{"id": "served", "root": self.checkpoint, "max_model_len": 256}]}
            case "server_info?config_format=json":
                model = {"logprobs_mode": "processed_logprobs", "dtype": "torch.float32"}
                return {"vllm_config": {"weight_transfer_config": {"backend": "gloo"}, "model_config": model}}
            case "v1/completions":
                return {"choices": [completion(ids, n) for ids in body["prompt"] for n in range(body["n"])]}
            case "get_world_size":
                return {"world_size": 1}
            case "init_weight_transfer_engine":
                info = body["init_info"]
                self._limit = info.get("packed_buffer_size_bytes", 2**30) if info["packed"] else 0
                store = dist.TCPStore(
                    info["master_address"], info["master_port"], info["world_size"], False, timeout=TIMEOUT
                )
                self._group = store, dist.ProcessGroupGloo(store, info["rank_offset"], info["world_size"], TIMEOUT)
            case "update_weights":
                info = body["update_info"]
                self._take_chunks(info["names"], info["dtype_names"], info["shapes"])
            case "finish_weight_update":
                self.finish()
            case "pause?mode=keep" | "start_weight_update" | "reset_prefix_cache" | "resume" | "health":
                pass
            case _:
                raise ValueError(f"vLLM has no route {path}")
        return {}

    def _take_chunks(self, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> None:
        begin, size = 0, 0
        for end, (dtype, shape) in enumerate(zip(dtypes, shapes, strict=True), 1):
            size += torch.empty(shape, dtype=getattr(torch, dtype), device="meta").nbytes
            if size > self._limit or end == len(names):
                self.take(names[begin:end], dtypes[begin:end], shapes[begin:end])
                begin, size = end, 0

    def receive(self, packed: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group[1].broadcast([packed], options).wait()


class DirectServer(VLLMServer):
    """With the plugin of this package in two workers, which hold parts of the tensors as tensor parallelism has them.

    Of each tensor a worker's loader reads what :func:`part` says; all else that it holds is NaN, or 0.
    """

    backend = "hf_zero_stream"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._workers: list[Receiver] = []
        self._held: list[dict[str, torch.Tensor]] = [{}, {}]
        self.patched: list[int] = []
        """How many elements each update of changes had."""
        self.received: list[int] = []
        """How many bytes both workers got from ranks, together, in each update."""
        self.shared: list[int] = []
        """How many of these one gave to the other."""
        self._received: list[int] = []
        self._shared: list[int] = []
        self.keeps_slices = True
        self._swaps = False

    def answer(self, path: str, body: Any) -> Any:
        match path:
            case "server_info?config_format=json":
                return {"vllm_config": {"weight_transfer_config": {"backend": self.backend}}}
            case "get_world_size":
                return {"world_size": 2}
            case "init_weight_transfer_engine":
                cpu, keeps = torch.device("cpu"), self.keeps_slices
                self._workers = in_two_threads(lambda n: Receiver(body["init_info"], n, cpu, keeps_slices=keeps))
                for worker in self._workers:
                    self._count(worker._group)
            case "moved":
                self._swaps = True
            case "update_weights":
                info = body["update_info"]
                if info["changes"]:
                    in_two_threads(lambda number: self._changes(number, info["buckets"]))
                else:
                    how = info["plan"], info["buckets"]
                    in_two_threads(lambda number: self._tensors(number, *how, sliced=info["sliced"]))
            case "finish_weight_update":
                for worker in self._workers:
                    worker.finish()
                self.updates.append(self._joined())
                for sums, noted in ((self.received, self._received), (self.shared, self._shared)):
                    sums.append(sum(noted))
                    noted.clear()
            case _:
                return super().answer(path, body)
        return {}

    def _count(self, group: Any) -> None:
        begin_receive, broadcast = group.begin_receive, group.broadcast_from_worker

        def received(tensor: torch.Tensor, sender: int) -> Any:
            self._received.append(tensor.nbytes)
            return begin_receive(tensor, sender)

        def shared(tensor: torch.Tensor, worker: int) -> None:
            if worker == group.number:
                self._shared.append(tensor.nbytes)
            broadcast(tensor, worker)

        group.begin_receive, group.broadcast_from_worker = received, shared

    def _tensors(self, number: int, plan: str, buckets: int, *, sliced: bool) -> None:
        held = self._held[number] = {}
        worker = self._workers[number]
        for tensors in worker.tensors(plan, buckets, sliced=sliced):
            assert not held.keys() & dict(tensors).keys()
            with worker.loading():
                self._load(held, tensors, number)

    def _load(self, held: dict[str, torch.Tensor], tensors: Sequence[tuple[str, torch.Tensor]], number: int) -> None:
        for name, tensor in tensors:
            mine = part(name, tuple(tensor.shape), number if not self._swaps else 1 - number)
            if mine is not None:
                held[name] = torch.full(tensor.shape, torch.nan).to(tensor.dtype)
                held[name][mine].copy_(tensor[mine])

    def _joined(self) -> dict[str, torch.Tensor]:
        """What both workers hold, together; of what both hold, the same."""
        joined: dict[str, torch.Tensor] = {}
        for number, held in enumerate(self._held):
            for name, tensor in held.items():
                mine = part(name, tuple(tensor.shape), number)
                if name in joined and mine == ...:
                    assert torch.equal(joined[name], tensor), name
                joined.setdefault(name, tensor.clone())[mine] = tensor[mine]
        return joined

    def _changes(self, worker: int, buckets: int) -> None:
        count = 0
        for changes in self._workers[worker].changes(buckets):
            for name, shape, indices, values in changes:
                count += len(values)
                if name in self._held[worker]:
                    held = self._held[worker][name]
                    assert (held.shape, held.dtype) == (shape, values.dtype)
                    held.view(-1)[indices.long()] = values
        if worker == 0:
            self.patched.append(count)


def part(name: str, shape: tuple[int, ...], worker: int) -> Any:
    """What one of two workers takes of a tensor, as vLLM's loaders do: rows, columns, or every other expert."""
    expert = re.search(r"experts\.(\d+)\.", name)
    if expert is not None:
        return ... if int(expert[1]) % 2 == worker else None
    half = {"q_proj": 0, "up_proj": 0, "o_proj": 1, "down_proj": 1}
    dim = next((each for key, each in half.items() if key in name), None)
    if dim is None or len(shape) < 2:
        return ...
    size = shape[dim] // 2
    return (slice(None),) * dim + (slice(worker * size, (worker + 1) * size if worker == 0 else None),)


def in_two_threads(work: Callable[[int], T]) -> list[T]:
    """What `work` gives for 0 and 1; nobody waits for a thread in which it receives from a rank that is dead."""
    futures: list[Future[T]] = [Future(), Future()]

    def run(number: int) -> None:
        try:
            futures[number].set_result(work(number))
        except BaseException as error:
            futures[number].set_exception(error)

    for number in range(2):
        threading.Thread(target=run, args=[number], daemon=True).start()
    return [future.result() for future in futures]


def completion(prompt: list[int], number: int) -> dict[str, Any]:
    """What vLLM says of a completion, of ids that TRL asks for; each of a prompt is another."""
    ids = [token + number % 2 for token in (4, 5, 6)]
    tokens = [f"token_id:{each}" for each in ids]
    logprobs = {"tokens": tokens, "token_logprobs": [-1.0] * 3, "top_logprobs": [{each: -1.0} for each in tokens]}
    return {"prompt_token_ids": prompt, "token_ids": ids, "logprobs": logprobs}


class SGLangServer(EngineServer):
    alive = "ping"
    _session = False

    def answer(self, path: str, body: Any) -> Any:
        match path:
            case "model_info":
                return {"model_path": self.checkpoint}
            case "server_info":
                return {"tp_size": 1, "pp_size": 1}
            case "init_weights_update_group":
                self._group = _sglang_group(body)
            case "begin_weight_update":
                self._session = True
            case "update_weights_from_distributed":
                assert self._session, "begin_weight_update comes first"
                assert body["load_format"] == "flattened_bucket" and body["flush_cache"] is False
                at = 0
                for dtype, shape in zip(body["dtypes"], body["shapes"], strict=True):
                    like = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
                    assert at % like.itemsize == 0, "Unaligned received tensor"
                    at += like.nbytes
                self.take(body["names"], body["dtypes"], body["shapes"])
            case "end_weight_update":
                self._session = False
                self.finish()
            case "pause_generation" | "flush_cache" | "continue_generation" | "ping":
                pass
            case _:
                raise ValueError(f"SGLang has no route {path}")
        return {"success": True, "message": ""}

    def receive(self, packed: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([packed], options).wait()


def _sglang_group(info: dict[str, Any]) -> Any:
    """A group of torch's as SGLang makes it beside its own."""
    method = f"tcp://{info['master_address']}:{info['master_port']}"
    store, rank, size = next(rendezvous(method, info["rank_offset"], info["world_size"], timeout=TIMEOUT))
    store = PrefixStore(info["group_name"], store)
    backend = Backend(info["backend"])
    group, _ = _new_process_group_helper(
        size, rank, [], backend, store, group_name=info["group_name"], timeout=TIMEOUT, backend_options=None
    )
    _world.pg_names.pop(group)  # this process has a server for each test
    _unregister_process_group(info["group_name"])
    return group
