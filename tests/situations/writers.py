"""What writes into a place, and what goes wrong with it: processes, threads, a disk, a bucket behind a proxy."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.buckets import Requests


VALUES = {"earlier": 1.0, "first": 2.0, "second": 3.0, "next": 9.0}
"""What each writer saves: all values of its weights and moments are this one."""

ON_DISK = {
    "write": ("pwritev", "open", "fsync", "posix_fallocate"),
    "rename": ("replace", "rename"),
    "list": ("listdir", "scandir"),
    "delete": ("unlink", "rmdir"),
    "make": ("mkdir",),
}
"""Functions of `os` that do each."""

ERRORS = {"no_space": errno.ENOSPC, "io_error": errno.EIO, "stale": errno.ESTALE}

_EMPTY = b'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>'
_LOGIN = b"<html><body>Please log in to this network</body></html>"


@dataclass(frozen=True)
class Fault:
    """What happens to one writer.

    Attributes:
        kind: "held", "killed", one of :data:`ERRORS`; or what a proxy does: "refused", "busy" (once), "unanswered"
            (carried out, and the answer lost), "cut" (half of the body arrives), "empty", "login"; "" for nothing.
        at: an operation of :data:`ON_DISK`, or of :func:`operation_of`.
        number: at which of these operations, from 1.
    """

    kind: str = ""
    at: str = ""
    number: int = 1


@dataclass(frozen=True)
class Job:
    """What one writer saves, and where."""

    name: str
    place: str
    what: str
    layers: int
    fault: Fault


def training(value: float, layers: int) -> tuple[Any, Any]:
    """A model and its optimizer, all of one value."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": 31}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
            optimizer.state[param]["exp_avg"].fill_(value)
            optimizer.state[param]["exp_avg_sq"].fill_(value)
    return model, optimizer


def save(job: Job) -> None:
    import hf_zero_stream

    value = VALUES[job.name]
    model, optimizer = training(value, job.layers)
    if job.what == "weights":
        hf_zero_stream.save_pretrained(model, job.place, max_shard_size="6KB")
        return
    how = {"optimizer": optimizer, "data": {"value": value}, "max_shard_size": "6KB", "keep_older": False}
    saved: Any = hf_zero_stream.save_state(model, job.place, asynchronous=job.what == "state_async", **how)
    if job.what == "state_async":
        saved.wait()


def load(place: str, what: str) -> dict[str, Any]:
    """All values that a load finds in a place, or its error."""
    import transformers

    import hf_zero_stream
    from hf_zero_stream.loading.integration import finish_saves_into
    from hf_zero_stream.ranks.coordinator import Coordinator

    found: set[float] = set()
    try:
        # As a load of several ranks does: what has happened, and has not been carried out to its end, is.
        finish_saves_into(place, "all", Coordinator.of_this_rank())
        layers = None
        if what != "weights":  # which does so at a URL too
            again, optimizer = training(0.0, 1)
            with contextlib.suppress(Exception):
                hf_zero_stream.load_state(again, place, optimizer=optimizer)
                layers = 1
        with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(progress=False)):
            model = transformers.AutoModelForCausalLM.from_pretrained(place)
        tensors = [param.detach() for param in model.parameters()]
        if what != "weights":
            # Of a save to a URL that has happened and is not done, from_pretrained finds all of the earlier weights.
            if "://" in place and len({float(value) for tensor in tensors for value in tensor.unique()}) == 1:
                tensors = []
            again, optimizer = training(0.0, layers or model.config.num_hidden_layers)
            resumed = hf_zero_stream.load_state(again, place, optimizer=optimizer)
            found.add(resumed.data["value"])
            states = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
            tensors += [param.detach() for param in again.parameters()] + states
        found |= {float(value) for tensor in tensors for value in tensor.unique()}
    except Exception as error:
        return _described(error)
    return {"values": sorted(found)}


def _described(error: BaseException) -> dict[str, Any]:
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "hf_zero_stream/" in frame.filename]
    frames = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in ours]
    kinds = [each.__name__ for each in type(error).__mro__]
    return {"error": f"{type(error).__name__}: {error}", "kinds": kinds, "frames": frames[-5:]}


def run_job(connection: Connection, job: Job) -> None:
    """Save, with the fault of a disk if there is one; tell the driver what became of it."""
    on_disk = job.fault.at in ON_DISK
    disk = faulty_disk(job.fault, job.place, connection) if on_disk else contextlib.nullcontext()
    try:
        with disk:
            save(job)
        found: dict[str, Any] = {"saved": True}
    except BaseException as error:
        found = _described(error)
    connection.send(found)


def writers(connections: list[Connection], jobs: list[Job], environment: dict[str, str]) -> None:
    """The body of a process: one writer, or one in each of several threads, each told by a message to begin."""
    _enter(environment)

    def begin(connection: Connection, job: Job) -> None:
        if connection.recv() == "save":
            run_job(connection, job)

    threads = [threading.Thread(target=begin, args=pair) for pair in zip(connections, jobs, strict=True)]
    for thread in threads[1:]:
        _has_several_writers.set()
        thread.start()
    begin(connections[0], jobs[0])  # in the main thread, as scripts do
    for thread in threads[1:]:
        thread.join()


def reader(connection: Connection, environment: dict[str, str]) -> None:
    """The body of a process that saves before and after the writers, and loads."""
    _enter(environment)
    while (order := connection.recv()) is not None:
        if isinstance(order, Job):
            run_job(connection, order)
        else:
            connection.send(load(*order))


def _enter(environment: dict[str, str]) -> None:
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    signal.alarm(180)  # nobody else would end it if the driver is killed


@contextlib.contextmanager
def faulty_disk(fault: Fault, place: str, connection: Any) -> Iterator[None]:
    """Inside, this writer's n-th call of such functions below `place` fails, waits for a message, or ends the process.

    What helpers write counts too, where a process has one writer.
    """
    mine, count = threading.get_ident(), [0]

    def replaced(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() in (mine, *helpers()) and _path_of(*args, **kwargs).startswith(place):
                count[0] += 1
                if count[0] == fault.number:
                    strike()
            return original(*args, **kwargs)

        return call

    def helpers() -> list[int | None]:
        others = [thread.ident for thread in threading.enumerate() if thread is not threading.main_thread()]
        return others if mine == threading.main_thread().ident and not _has_several_writers.is_set() else []

    def strike() -> None:
        connection.send({"struck": True})
        if fault.kind == "held":
            connection.recv()
        elif fault.kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            raise OSError(ERRORS[fault.kind], os.strerror(ERRORS[fault.kind]))

    originals = {name: getattr(os, name) for name in ON_DISK[fault.at]}
    try:
        for name, original in originals.items():
            setattr(os, name, replaced(original))
        yield
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


_has_several_writers = threading.Event()


def _path_of(first: Any = "", *_: Any, dir_fd: int | None = None, **__: Any) -> str:
    """The path that a call of `os` is for."""
    for handle in (first, dir_fd):
        if isinstance(handle, int):
            with contextlib.suppress(OSError):
                return os.readlink(f"/proc/self/fd/{handle}")
    return os.fspath(first) if isinstance(first, (str, os.PathLike)) else ""


def operation_of(method: str, path: str) -> str:
    """The operation of a request: "list", "get", "put", "delete" or "multipart"."""
    query = path.partition("?")[2]
    if method == "DELETE" or query.startswith("delete"):
        return "delete"
    if "uploads" in query or "uploadId" in query:
        return "multipart"
    if method == "GET":
        return "list" if "list-type" in query else "get"
    return "put" if method == "PUT" else "get"


@dataclass
class Proxy(Requests):
    """The proxy in front of a bucket: it tells writers apart by their access keys, and each has its fault."""

    faults: dict[str, Fault] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    struck: dict[str, threading.Event] = field(default_factory=dict)
    go: dict[str, threading.Event] = field(default_factory=dict)
    kill: Callable[[str], None] = lambda name: None

    def expect(self, name: str, fault: Fault) -> None:
        self.faults[name], self.counts[name] = fault, 0
        self.struck[name], self.go[name] = threading.Event(), threading.Event()

    def around(self, server: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
        def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
            name = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2].partition("/")[0]
            fault = self.faults.get(name, Fault())
            path = f"{environ['PATH_INFO']}?{environ.get('QUERY_STRING', '')}".rstrip("?")
            if not fault.kind or operation_of(environ["REQUEST_METHOD"], path) != fault.at:
                return server(environ, start)
            self.counts[name] += 1
            number, stays = self.counts[name], fault.kind in ("refused", "empty", "login")
            if number < fault.number or (number > fault.number and not stays):
                return server(environ, start)
            self.struck[name].set()
            return self._strike(name, fault.kind, server, environ, start)

        return answer

    def _strike(
        self,
        name: str,
        kind: str,
        server: Callable[..., Iterable[bytes]],
        environ: dict[str, Any],
        start: Callable[..., Any],
    ) -> Iterable[bytes]:
        length = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(length)
        if kind == "cut":
            body = body[: length // 2]
        environ |= {"wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
        if kind in ("held", "killed"):
            if kind == "killed":
                self.kill(name)
            self.go[name].wait(60)
        if kind in ("held", "cut"):
            return server(environ, start)
        if kind == "unanswered":
            list(server(environ, lambda *args, **kwargs: lambda data: None))
        status, answer = {"refused": ("403 No", b"no"), "empty": ("200 OK", _EMPTY), "login": ("200 OK", _LOGIN)}.get(
            kind, ("503 Busy", b"busy")
        )
        kind_of_answer = "text/html" if kind == "login" else "application/xml"
        start(status, [("Content-Length", str(len(answer))), ("Content-Type", kind_of_answer)])
        return [answer]
