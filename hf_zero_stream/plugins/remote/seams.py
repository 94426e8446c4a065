"""The seams of loads from URLs: small files are fetched when transformers asks for them, weights stay URLs.

``cached_files`` is where transformers looks for any file of a checkpoint that is not in a folder: configs, tokenizers,
indexes, shards. Code of a checkpoint is put into a folder, because that is where changed code is noticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import dynamic_module_utils
from transformers.utils import logging

from ...errors import ReadError, UnsupportedError
from ...plugin_api import (
    Original,
    Session,
    UrlCheckpoints,
    announced_local_rank,
    checkpoints_at,
    holds_values,
    is_url,
    may_be_at_url,
    scope,
    url_of,
)
from . import checkpoints
from .response_cache import ResponseCache
from .small_files import SmallFiles
from .urls import RequestFailed, joined


logger = logging.get_logger(__name__)

_ADAPTER = "adapter_config.json"
_CONFIG = "config.json"
_WITHOUT_MODEL = ("tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
"""What folders of a tokenizer or a processor alone hold."""


_OURS: UrlCheckpoints = checkpoints


def _url_of(path: Any, kwargs: Mapping[str, Any]) -> str:
    """The URL of a checkpoint that the running code, inside ``streaming()``, loads from one of ours; "" for others."""
    return url_of(path, kwargs) if may_be_at_url(path) and checkpoints_at(path) is _OURS else ""


def cached_files(original: Original, path_or_repo_id: Any, filenames: Any, *args: Any, **kwargs: Any) -> Any:
    """As stock's: the paths of all files, or None or an OSError if one is not there."""
    is_model = kwargs.get("repo_type") in (None, "model")
    url = is_model and _url_of(path_or_repo_id, kwargs)
    if not url:
        return original(path_or_repo_id, filenames, *args, **kwargs)
    files = scope.resource(SmallFiles)
    are_required = kwargs.get("_raise_exceptions_for_missing_entries", True)
    found = []
    for name in filenames:
        place = joined(url, kwargs.get("subfolder") or "", name)
        try:
            if name.endswith(".gguf"):
                raise UnsupportedError(f"{place}: GGUF files are not read from URLs. Download it.")
            if not holds_values(name):
                found.append(str(files.fetch(place)))
                if name == _ADAPTER:
                    raise UnsupportedError(f"{place}: adapters are not loaded from URLs. Download the adapter.")
                continue
            if not are_required:  # else it is a shard, which the index promises, and its header will be read
                files.require(place)
            found.append(files.pinned(place))
        except RequestFailed as error:
            if name == _CONFIG and error.status in (403, 404) and _is_without_model(files, place):
                return None  # as stock
            if are_required or error.status not in (403, 404):
                raise ReadError(f"{place}: {error}") from error
            # Who may not list a bucket is told 403 of objects that are not there.
            if error.status == 403 and announced_local_rank() == 0:
                logger.info(f"{place}: {error} It counts as absent.")
            return None
    cache = ResponseCache.current()
    if are_required and cache is not None and _reads_headers():
        files.prefetch([], filter(is_url, found), cache)
    return found


def _is_without_model(files: SmallFiles, config: str) -> bool:
    """Whether there is a tokenizer or a processor where there is no `config`; else its URL may be wrong."""
    for name in _WITHOUT_MODEL:
        try:
            files.fetch(joined(config.removesuffix(_CONFIG), name))
        except RequestFailed:
            continue
        return True
    return False


def _reads_headers() -> bool:
    session = Session.current()
    return session is not None and (session.load.coordinator.is_main or session.load.coordinator.is_alone)


def list_repo_templates(original: Original, repo_id: Any, **kwargs: Any) -> Any:
    """The names of a repository's further chat templates; behind a URL nothing is listed, so there are none."""
    if _url_of(repo_id, kwargs):
        return []
    return original(repo_id, **kwargs)


def has_file(original: Original, path_or_repo: Any, filename: str, *args: Any, **kwargs: Any) -> Any:
    """Asked of safetensors beside ``.bin`` files, to convert these on the Hub; or to improve an error message."""
    if _url_of(path_or_repo, {}):
        return True
    return original(path_or_repo, filename, *args, **kwargs)


def get_cached_module_file(original: Original, path: Any, module_file: str, *args: Any, **kwargs: Any) -> Any:
    """Fetch a module and those that it imports into a folder, from which transformers takes them."""
    url = _url_of(path, kwargs)
    if not url:
        return original(path, module_file, *args, **kwargs)
    files = scope.resource(SmallFiles)
    folder = files.new_folder(url)
    pending, done = [module_file], set[str]()
    while pending:
        name = pending.pop()
        if name in done:
            continue
        done.add(name)
        try:
            module = files.fetch(joined(url, kwargs.get("subfolder") or "", name), folder)
        except RequestFailed as error:
            raise ReadError(f"{joined(url, name)}: {error}") from error
        pending += [f"{needed}.py" for needed in dynamic_module_utils.get_relative_imports(module)]
    return original(str(folder), module_file)
