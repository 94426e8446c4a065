"""URLs of checkpoints: which there are, and how one falls into a store and a key in it.

========================================  ============================================
``s3://bucket/prefix``                    Amazon S3, and what speaks its protocol
``gs://bucket/prefix``                    Google Cloud Storage
``az://account/container/prefix``         Azure Blob Storage
``https://host/path``, ``http://...``     a web server that answers requests for ranges
``hf://organisation/name@revision``       a repository of the Hugging Face Hub
========================================  ============================================
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from ..errors import UrlError


__all__ = ["Location", "Repository", "is_url", "joined", "located", "repository_of", "scheme_of"]

_URL = re.compile(r"(s3|gs|az|https?|hf)://(.*)", re.DOTALL)
_REPOSITORY = re.compile(r"([\w.-]+/[\w.-]+)(?:@([^/]+))?(?:/(.*))?")


class Location(NamedTuple):
    """An object: the URL of its store (a bucket, a container, a host), and its key there, not percent-encoded."""

    store: str
    key: str


class Repository(NamedTuple):
    """What an ``hf://`` URL names; `revision` and `file` may be empty."""

    name: str
    revision: str
    file: str

    @property
    def url(self) -> str:
        revision = f"@{quote(self.revision, safe='')}" if self.revision else ""
        return "/".join(filter(None, (f"hf://{self.name}{revision}", self.file)))


def is_url(path: Any) -> bool:
    """Whether `path` names a place that is read over the network."""
    return isinstance(path, str) and _URL.fullmatch(path) is not None


def scheme_of(url: str) -> str:
    found = _URL.fullmatch(url)
    assert found is not None
    return found[1]


def joined(url: str, *names: str) -> str:
    """The URL of a file below `url`; names that are empty do not count."""
    scheme, separator, rest = url.partition("://")
    return "/".join([f"{scheme}{separator}{rest.rstrip('/')}", *(name.strip("/") for name in names if name)])


def located(url: str) -> Location:
    """The store and the key of `url`, which is none of the Hub; raises an UrlError if it has no such parts."""
    found = _URL.fullmatch(url)
    assert found is not None
    scheme, rest = found[1], found[2]
    depth = 2 if scheme == "az" else 1
    parts = rest.split("/")
    root, key = parts[:depth], "/".join(parts[depth:])
    fault = ""
    if len(root) < depth or not all(root):
        fault = "no account and container" if scheme == "az" else "no host or bucket"
    elif not rest.isprintable():
        fault = "characters that cannot be printed"
    elif "?" in rest or "#" in rest:
        fault = "a query or a fragment, to which no file's name can be appended"
    elif "@" in root[0]:
        fault = "a user name or a password, which would be in every log"
    elif any(part in (".", "..") for part in map(unquote, parts)):
        fault = "'.' or '..' between two slashes"
    if fault:
        form = {"az": "account/container/prefix", "s3": "bucket/prefix", "gs": "bucket/prefix"}.get(
            scheme, "host/path"
        )
        raise UrlError(f"{_without_secrets(url)!r}: expected {scheme}://{form}; found {fault}.")
    return Location(f"{scheme}://{'/'.join(root)}", unquote(key) if scheme in ("http", "https") else key)


def _without_secrets(url: str) -> str:
    """`url` as an error may quote it, without what stands before an @, and the query, which may hold a signature."""
    return re.sub(r"//[^/?#]*@", "//...@", re.sub(r"\?.*", "?...", url, flags=re.DOTALL))


def repository_of(url: str) -> Repository:
    """What an ``hf://`` URL names; a revision with a slash in it is written with ``%2F``."""
    found = _REPOSITORY.fullmatch(url.removeprefix("hf://").rstrip("/"))
    if found is None or not url.isprintable():
        raise UrlError(
            f"{_without_secrets(url)!r}: expected hf://organisation/name or hf://organisation/name@revision."
        )
    return Repository(found[1], unquote(found[2] or ""), found[3] or "")
