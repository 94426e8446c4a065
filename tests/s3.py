"""A bucket on a server that speaks S3's protocol: moto's, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
from moto.server import ThreadedMotoServer


BUCKET = "checkpoints"


@contextmanager
def s3_bucket(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which ``s3://checkpoints/...`` is a copy of `folder`."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    access = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "secret"}
    environment = {**access, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}
    try:
        client = boto3.client(
            "s3",
            endpoint_url=environment["AWS_ENDPOINT_URL"],
            aws_access_key_id="somebody",
            aws_secret_access_key="secret",
            region_name="us-east-1",
        )
        client.create_bucket(Bucket=BUCKET)
        for file in folder.rglob("*"):
            if file.is_file():
                client.upload_file(str(file), BUCKET, str(file.relative_to(folder)))
        yield {**environment, "AWS_REGION": "us-east-1"}
    finally:
        server.stop()
