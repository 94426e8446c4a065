"""Checkpoints in buckets, on web servers and on the Hugging Face Hub; docs/sources.md describes them."""

from __future__ import annotations

from ...plugin_api import PatchScope, Plugin, Source, rows


_FORMS = {
    "s3": "bucket/prefix",
    "gs": "bucket/prefix",
    "az": "account/container/prefix",
    "hf": "organisation/name",
    "https": "host/path",
    "http": "host/path",
}

_FEATURE = "loads from URLs"

PLUGIN = Plugin(
    "remote",
    sources={scheme: Source(form, f"{__name__}.checkpoints") for scheme, form in _FORMS.items()},
    targets=dict.fromkeys(("s3", "gs", "az"), f"{__name__}.saves"),
    rows={
        PatchScope.BLOCK: [
            # Where transformers looks for any file of a checkpoint that is in no folder; modules among them.
            *rows(
                """
                utils.hub:cached_files                       seams:cached_files
                tokenization_utils_base:list_repo_templates  seams:list_repo_templates
                processing_utils:list_repo_templates         seams:list_repo_templates
                modeling_utils:has_file                      seams:has_file
                dynamic_module_utils:get_cached_module_file  seams:get_cached_module_file
                """,
                "transformers.",
                f"{__name__}.",
                feature=_FEATURE,
                when=".sources.base:has_url_argument",
            ),
            *rows("transformers.dynamic_module_utils:get_relative_imports", feature=_FEATURE),
        ],
    },
)
