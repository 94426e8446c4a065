"""HTTP requests of one server while something else goes on beside them: each is made once, and watched."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch

from ...errors import ConfigError, StreamError
from ...plugin_api import accelerators, pauses


T = TypeVar("T")

ASK_INTERVAL_S = 5.0
"""While an answer is waited for, how often the server is asked whether it is alive."""

ANSWER_S = 10.0
"""How long it may take to answer that."""


class ServerClient:
    """Requests of the server at `url`. What has failed is not made again: a second update would wait for ever.

    While this rank waits, it looks after the server by the route `alive`, and after the other ranks by `check`.
    """

    def __init__(self, url: str, alive: str, device: torch.device) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url: expected the address of a server, http://host:port; got {url!r}")
        self.url = url.rstrip("/")
        self.check: Callable[[], None] = lambda: None
        self.asks = True
        """Whether this rank looks after the server, and not only after other ranks."""
        self._alive, self._device = alive, device
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._host = parts.hostname

    def own_address(self) -> str:
        """This host's address, as the server sees it."""
        try:
            with socket.create_connection((self._host, self._port), timeout=ANSWER_S) as connection:
                return str(connection.getsockname()[0])
        except OSError as error:
            raise StreamError(f"{self.url}: no server answers there: {error}") from error

    def get(self, path: str) -> Any:
        return self.wait(self.background(partial(self._request, path, None, None)))

    def post(self, path: str, body: Any = None) -> Any:
        return self.wait(self.begin_post(path, body))

    def begin_post(self, path: str, body: Any = None) -> Future[Any]:
        """The answer to come."""
        return self.background(partial(self._request, path, json.dumps(body or {}).encode(), None))

    def background(self, work: Callable[[], T]) -> Future[T]:
        """The result of `work` to come, from a thread that nobody waits for when this process ends."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                with accelerators.on_device(self._device):
                    result = work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=run, name="hf_zero_stream-send", daemon=True).start()
        return future

    def wait(self, wanted: Future[T], beside: Future[Any] | None = None) -> T:
        """The result of `wanted`, unless what goes on `beside` it fails first, or the server or a rank dies."""
        asked: Future[Any] | None = None
        asked_s = 0.0
        for waited_s in pauses(0.005, share=0.1):
            if beside is not None and beside.done():
                beside.result()
            if wanted.done():
                return wanted.result()
            self.check()
            if asked is not None and asked.done():
                asked.result()
                asked, asked_s = None, waited_s
            elif self.asks and asked is None and waited_s - asked_s > ASK_INTERVAL_S:
                asked = self.background(partial(self._request, self._alive, None, ANSWER_S))
        raise AssertionError("pauses do not end")

    def _request(self, path: str, data: bytes | None, timeout: float | None) -> Any:
        request = urllib.request.Request(f"{self.url}/{path}", data, {"Content-Type": "application/json"})
        what = f"{'GET' if data is None else 'POST'} {request.full_url}"
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise StreamError(f"{what} answered {error.code}: {_shortened(error.read())}") from error
        except OSError as error:
            raise StreamError(f"{what}: no answer: {getattr(error, 'reason', error)}") from error
        try:
            return json.loads(text) if text else None
        except ValueError:
            return None  # what says only that it is alive


def _shortened(text: bytes) -> str:
    return text.decode(errors="replace").strip()[:500]
