"""Servers with the routes of vLLM's and SGLang's for new weights: they note each call, and take what is broadcast.

What they may be asked, in which order and with which fields, is read from vllm 0.32 and sglang 0.5.23. A call that
the real one would not take is answered with 400. For faults, a route may be given another answer.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hf_zero_stream.stream.receiver import Receiver


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
    """With the plugin of this package in two workers, which hold whole tensors."""

    backend = "hf_zero_stream"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._workers: list[Receiver] = []
        self._held: list[dict[str, torch.Tensor]] = [{}, {}]
        self.patched: list[int] = []
        """How many elements each update of changes had."""

    def answer(self, path: str, body: Any) -> Any:
        match path:
            case "server_info?config_format=json":
                return {"vllm_config": {"weight_transfer_config": {"backend": self.backend}}}
            case "get_world_size":
                return {"world_size": 2}
            case "init_weight_transfer_engine":
                self._workers = in_two_threads(lambda n: Receiver(body["init_info"], n, torch.device("cpu")))
            case "update_weights":
                info = body["update_info"]
                work = self._changes if info["changes"] else self._tensors
                in_two_threads(lambda number: work(number, info["plan"]))
            case "finish_weight_update":
                first, second = self._held
                assert first.keys() == second.keys()
                assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
                self.updates.append({name: tensor.clone() for name, tensor in first.items()})
            case _:
                return super().answer(path, body)
        return {}

    def _tensors(self, worker: int, plan: str) -> None:
        self._held[worker] = {}
        for tensors in self._workers[worker].tensors(plan):
            assert not self._held[worker].keys() & dict(tensors).keys()
            self._held[worker].update(tensors)

    def _changes(self, worker: int, plan: str) -> None:
        count = 0
        for changes in self._workers[worker].changes(plan):
            for name, shape, indices, values in changes:
                held = self._held[worker][name]
                assert (held.shape, held.dtype) == (shape, values.dtype)
                held.view(-1)[indices.long()] = values
                count += len(values)
        if worker == 0:
            self.patched.append(count)


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
    from torch.distributed.distributed_c10d import (
        Backend,
        PrefixStore,
        _new_process_group_helper,
        _unregister_process_group,
        _world,
        rendezvous,
    )

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
