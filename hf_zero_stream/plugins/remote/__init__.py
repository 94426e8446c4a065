"""Checkpoints in buckets, on web servers and on the Hugging Face Hub; docs/sources.md describes them."""

from __future__ import annotations

from ...plugin_api import PatchScope, Plugin, Row, Source


_FORMS = {
    "s3": "bucket/prefix",
    "gs": "bucket/prefix",
    "az": "account/container/prefix",
    "hf": "organisation/name",
    "https": "host/path",
    "http": "host/path",
}

_FEATURE, _WHEN = "loads from URLs", ".sources.base:has_url_argument"

PLUGIN = Plugin(
    "remote",
    sources={scheme: Source(form, f"{__name__}.checkpoints") for scheme, form in _FORMS.items()},
    targets=dict.fromkeys(("s3", "gs", "az"), f"{__name__}.saves"),
    rows={
        PatchScope.BLOCK: [
            # Where transformers looks for any file of a checkpoint that is in no folder; modules among them.
            *[
                Row(f"transformers.{of}", f"{__name__}.seams:{leads_to}", feature=_FEATURE, when=_WHEN)
                for of, leads_to in (
                    ("utils.hub:cached_files", "cached_files"),
                    ("tokenization_utils_base:list_repo_templates", "list_repo_templates"),
                    ("processing_utils:list_repo_templates", "list_repo_templates"),
                    ("modeling_utils:has_file", "has_file"),
                    ("dynamic_module_utils:get_cached_module_file", "get_cached_module_file"),
                )
            ],
            Row("transformers.dynamic_module_utils:get_relative_imports", "", feature=_FEATURE),
        ],
    },
)
