"""URLs of checkpoints: which there are, and how one falls into a store and a key in it.

========================================  ============================================
``s3://bucket/prefix``                    Amazon S3, and what speaks its protocol
``gs://bucket/prefix``                    Google Cloud Storage
``az://account/container/prefix``         Azure Blob Storage
``https://host/path``, ``http://...``     a web server that answers requests for ranges
``hf://organisation/name@revision``       a repository of the Hugging Face Hub; some, as gpt2, have no organisation
========================================  ============================================
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import quote, unquote

from ...errors import UrlError
from ...plugin_api import without_secrets
from . import PLUGIN


_REPOSITORY = re.compile(r"([\w.-]+(?:/[\w.-]+)?)(?:@(refs/pr/\d+|refs/convert/\w+|[^/]+))?(?:/(.*))?")
_NO_ORGANISATIONS = ("datasets", "spaces", "buckets", "models")
"""What ``hf://`` URLs of huggingface_hub begin with where they name something else than a model."""

_FILE = re.compile(r"\.(safetensors|json|bin|pth?|gguf)$")


class StoreKey(NamedTuple):
    """An object: the URL of its store (a bucket, a container, a host), and its key there, not percent-encoded."""

    store: str
    key: str


class Repository(NamedTuple):
    """A repository that an ``hf://`` URL names; `revision` and `file` may be empty."""

    name: str
    revision: str
    file: str

    @property
    def url(self) -> str:
        revision = self.revision or ("" if "/" in self.name else "main")  # or a file would look like a second part
        revision = revision and f"@{quote(revision, safe='')}"
        return "/".join(filter(None, (f"hf://{self.name}{revision}", self.file)))


def checkpoint_url(path: str) -> str:
    """The URL that a user gave for a checkpoint, without slashes at its end.

    Raises an UrlError if there can be no checkpoint: the error comes before any request, and tells what to write.
    """
    scheme = scheme_of(path)
    url = path.rstrip("/") if path.partition("://")[2].strip("/") else path
    key = repository_of(url).file if scheme == "hf" else located(url).key
    if _FILE.search(key):
        raise UrlError(
            f"{url!r}: expected the prefix of a checkpoint; found the name of a file. Leave out its last part."
        )
    if re.match(r"https?://(www\.)?(huggingface\.co|hf\.co)/", url, re.IGNORECASE) and "/resolve/" not in key:
        name = "/".join(key.split("/")[:2])
        raise UrlError(f"{url!r}: expected hf://{name} or hf://{name}@revision; found a page of the Hub.")
    return url


def scheme_of(url: str) -> str:
    return url.partition("://")[0].lower()


def joined(url: str, *names: str) -> str:
    """The URL of a file below `url`; names that are empty do not count."""
    scheme, separator, rest = url.partition("://")
    return "/".join([f"{scheme}{separator}{rest.rstrip('/')}", *(name.strip("/") for name in names if name)])


def located(url: str) -> StoreKey:
    """The store and the key of `url`, which is none of the Hub; raises an UrlError if it has no such parts."""
    scheme, rest = scheme_of(url), url.partition("://")[2]
    depth = 2 if scheme == "az" else 1
    parts = rest.split("/")
    root, key = parts[:depth], "/".join(parts[depth:])
    fault = ""
    if len(root) < depth or not all(root):
        fault = "no account and container" if scheme == "az" else "no host or bucket"
    elif not rest.isprintable():
        fault = "characters that cannot be printed"
    elif "?" in rest or "#" in rest:
        fault = (
            "a query or a fragment, to which no file's name can be appended. A presigned address is that of one file: "
            "give credentials in the environment"
        )
    elif "@" in root[0]:
        fault = "a user name or a password, which would be in every log"
    elif any(part in (".", "..") for part in map(unquote, parts)):
        fault = "'.' or '..' between two slashes"
    elif "" in "/".join(parts[depth:]).rstrip("/").split("/")[:-1]:
        fault = "two slashes one after the other, which obstore cannot ask for"
    if fault:
        form = PLUGIN.sources[scheme].form
        raise UrlError(f"{without_secrets(url)!r}: expected {scheme}://{form}; found {fault}.")
    return StoreKey(f"{scheme}://{'/'.join(root)}", unquote(key) if scheme in ("http", "https") else key)


def repository_of(url: str) -> Repository:
    """Parse an ``hf://`` URL; in a revision a slash is written ``%2F``, but for ``refs/pr/1`` and its like."""
    found = _REPOSITORY.fullmatch(url.partition("://")[2].rstrip("/"))
    fault = ""
    if found is None or not url.isprintable():
        fault = "."
    elif (kind := found[1].partition("/")[0]) in _NO_ORGANISATIONS:
        fault = f"; found {kind}/, which is no organisation. Only repositories of models are read."
    if found is None or fault:
        expected = "expected hf://organisation/name or hf://organisation/name@revision"
        raise UrlError(f"{without_secrets(url)!r}: {expected}{fault}")
    return Repository(found[1], unquote(found[2] or ""), found[3] or "")


PASSING_STATUS = frozenset({408, 425, 429})
"""Besides 5xx: what a server answers that may do so a moment later."""


class RequestFailed(OSError):
    """A request that failed; its text names no file. `status` is that of HTTP, 0 if there was no answer."""

    def __init__(self, text: str, status: int = 0, is_transient: bool = False) -> None:
        super().__init__(text)
        self.status, self.is_transient = status, is_transient
