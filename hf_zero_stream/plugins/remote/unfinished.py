"""Aborts uploads that nobody is going to finish: their parts cost as much as objects do, and no list shows them."""

from __future__ import annotations

import os
from collections.abc import Collection

from transformers.utils import logging

from .files import endpoint_of
from .objects import RemoteFolder
from .urls import joined, located, scheme_of


logger = logging.get_logger(__name__)

_ADVICE = "A rule for the bucket's lifecycle that aborts incomplete multipart uploads removes their parts."


def abort_uploads(place: RemoteFolder, created: Collection[str], replaced: Collection[str]) -> None:
    """Abort all uploads of objects with these names below `place`; where that is not possible, say so.

    Of those `created` there is no object; of those `replaced` there is an earlier one.
    """
    scheme = scheme_of(place.url)
    if scheme == "s3":
        _abort_in_s3(place, {*created, *replaced})
    elif scheme == "az":
        # A blob that is put takes the place of all parts that have been sent for it.
        for name in created:
            place.put(name, b"")
        place.remove(created)
    else:
        logger.info(f"{place.url}: parts of an upload that was not finished may be left. {_ADVICE}")


def _abort_in_s3(place: RemoteFolder, names: Collection[str]) -> None:
    """By boto3: obstore neither lists uploads nor aborts those of other processes."""
    try:
        import boto3
        from botocore import UNSIGNED
        from botocore.config import Config
    except ImportError:
        logger.warning(f"{place.url}: parts of an upload may be left; boto3, which aborts it, is missing. {_ADVICE}")
        return
    store, prefix = located(place.url)
    bucket = store.partition("://")[2]
    is_public = os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true")
    client = boto3.client(
        "s3",
        endpoint_url=endpoint_of("s3") or None,
        region_name=os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
        config=Config(signature_version=UNSIGNED) if is_public else None,
    )
    keys = {located(joined(place.url, name)).key for name in names}
    for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix):
        for upload in page.get("Uploads", ()):
            if upload["Key"] in keys:
                client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
