"""Resolves files of the Hugging Face Hub, which redirects to a store by an address that expires.

huggingface_hub knows the Hub's conventions (``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HUB_OFFLINE``).
"""

from __future__ import annotations

import threading
import time
from typing import NamedTuple
from urllib.parse import urlsplit, urlunsplit

from .urls import PASSING_STATUS, RequestFailed, repository_of, scheme_of


EXPIRES_S = 600.0
"""An address is asked for anew after this time: the Hub's are valid for an hour."""

JUST_NOW_S = 5.0

_tokens: dict[str, str | bool] = {}
"""By repository: what ``from_pretrained(token=...)`` was given."""


class HubFile(NamedTuple):
    """The address of a file's contents; `commit` is that of the revision that was asked for."""

    url: str
    headers: tuple[tuple[str, str], ...]
    tag: str
    commit: str


def remember_token(repository: str, token: str | bool | None) -> None:
    """Use `token` for all files of a repository in this process."""
    if token is not None:
        _tokens[repository] = token


def resolved_file(url: str) -> HubFile:
    """Ask the Hub for a file; raises FileNotFoundError if the repository lacks it, or a RequestFailed."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, OfflineModeIsEnabled
    from huggingface_hub.utils import build_hf_headers

    repository = repository_of(url)
    address = hf_hub_url(repository.name, repository.file, revision=repository.revision or None)
    token = _tokens.get(repository.name)
    try:
        found = get_hf_file_metadata(address, token=token)
    except EntryNotFoundError as error:
        raise FileNotFoundError(f"{url}: the repository has no such file") from error
    except Exception as error:  # huggingface_hub's HTTP library, and so its errors, depend on the version
        status = getattr(getattr(error, "response", None), "status_code", 0)
        passes = status >= 500 or status in PASSING_STATUS or not (status or isinstance(error, OfflineModeIsEnabled))
        raise RequestFailed(f"the Hub does not give it: {error}", status, passes) from error
    try:
        before, after = urlsplit(address), urlsplit(found.location)
    except ValueError as error:  # such as a bracket that is not closed
        raise RequestFailed(f"the Hub redirects to what is no address: {error}.") from error
    if after.scheme != "https" and (after.scheme != "http" or before.scheme != "http"):
        raise RequestFailed(f"the Hub redirects from {before.scheme} to {after.scheme}:, which is not followed.")
    if not after.hostname or "@" in after.netloc:
        raise RequestFailed("the Hub redirects to an address without a host or with a user name: it is not followed.")
    headers: tuple[tuple[str, str], ...] = ()
    if after.netloc == before.netloc:  # elsewhere the address itself says who may read
        authorization = build_hf_headers(token=token).get("authorization")
        headers = (("authorization", authorization),) if authorization else ()
    return HubFile(urlunsplit(after), headers, found.etag or "", found.commit_hash or "")


class HubFiles:
    """Remembers, for a while, where files lie."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[float, HubFile]] = {}
        self._lock = threading.Lock()

    def resolve(self, url: str) -> HubFile:
        """See :func:`resolved_file`."""
        with self._lock:
            asked, found = self._found.get(url, (0.0, None))
        if found is None or time.monotonic() - asked > EXPIRES_S:
            found = resolved_file(url)
            with self._lock:
                self._found[url] = (time.monotonic(), found)
        return found

    def pinned(self, url: str) -> str:
        """An ``hf://`` URL with the commit that its revision means now; other URLs as they are."""
        if scheme_of(url) != "hf":
            return url
        commit = self.resolve(url).commit
        return repository_of(url)._replace(revision=commit).url if commit else url

    def forget(self, url: str) -> bool:
        """Ask anew for a file whose address was refused; False if it was asked for just now, and not from memory."""
        with self._lock:
            asked, _ = self._found.pop(url, (time.monotonic(), None))
        return time.monotonic() - asked > JUST_NOW_S

    def tag(self, url: str) -> str:
        """The ETag that the Hub itself gives a file, a hash of its contents; "" for other URLs."""
        return self.resolve(url).tag if scheme_of(url) == "hf" else ""
