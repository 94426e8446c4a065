"""Another distribution's plug-in brings a scheme: loads and commands read from its URLs, beside those of others."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.support.forks import Forks
from tests.support.http_files import http_files
from tests.support.zoo import make_checkpoint


DECLARATION = """\
from hf_zero_stream.registry.plugins import Plugin, Source
from hf_zero_stream.registry.rows import PatchScope, Row

PLUGIN = Plugin(
    "vault",
    sources={"vault": Source("shelf/name", "vault.shelves")},
    rows={
        PatchScope.BLOCK: [
            Row(
                "transformers.utils.hub:cached_files",
                "vault.shelves:cached_files",
                feature="loads from the vault",
                when=".sources.base:has_url_argument",
            )
        ]
    },
)
"""

SHELVES = """\
import os
from contextlib import nullcontext
from pathlib import Path
from hf_zero_stream.checkpoint.soundness import check_soundness as sound, shards_of
from hf_zero_stream.errors import ReadError, UrlError
from hf_zero_stream.sources.base import Hints
from tests.support.memory_files import MemoryFiles

def folder(url):
    return Path(os.environ["VAULT"], url.removeprefix("vault://"))

def canonical(path, revision=None, token=None):
    if path.count("/") < 3:
        raise UrlError(f"{path}: expected vault://shelf/name")
    return path.rstrip("/")

def source(retries):
    files = folder("").rglob("*.safetensors")
    contents = {f"vault://{path.relative_to(folder(''))}": path.read_bytes() for path in files}
    return MemoryFiles(contents, retries, Hints(2**20, is_remote=True, is_everywhere=True, streams_per_rank=2))

def prefetching(url, names):
    return nullcontext()

def has_file(url, name):
    return (folder(url) / name).is_file()

def shards(url):
    files, weight_map = shards_of(folder(url))
    return [f"{url}/{os.path.basename(file)}" for file in files], weight_map

def check_soundness(url):
    return sound(folder(url))

def cached_files(original, path_or_repo_id, filenames, **kwargs):
    if not str(path_or_repo_id).startswith("vault://"):
        return original(path_or_repo_id, filenames, **kwargs)
    url = canonical(path_or_repo_id)
    for name in filenames:
        if not has_file(url, name):
            if kwargs.get("_raise_exceptions_for_missing_entries", True):
                raise ReadError(f"{url}/{name}: there is no such file")
            return None
    return [f"{url}/{name}" if name.endswith(".safetensors") else str(folder(url) / name) for name in filenames]
"""

SCRIPT = """\
import sys
sys.path.insert(0, sys.argv[1])
import torch, transformers, hf_zero_stream
from typer.testing import CliRunner
from hf_zero_stream.cli import app
from hf_zero_stream.errors import UrlError
auto = transformers.AutoModelForCausalLM
plain = auto.from_pretrained(sys.argv[2]).state_dict()
with hf_zero_stream.streaming():
    assert not [name for name in sys.modules if name.startswith("vault.")]
    for url in sys.argv[3:]:
        model = auto.from_pretrained(url)
        assert model.streaming_report.ranks[0].bytes_read
        assert all(torch.equal(value, plain[name]) for name, value in model.state_dict().items()), url
for command in ("inspect", "verify"):
    done = CliRunner().invoke(app, [command, "vault://shelf/moe"])
    assert done.exit_code == 0 and "vault://shelf/moe" in done.stdout, done.output
for wrong, says in (("vault://", "expected vault://shelf/name"), ("gcs://x/y", "vault://shelf/name")):
    try:
        hf_zero_stream.plan(wrong, world_size=2)
    except (UrlError, hf_zero_stream.errors.MissingPluginError) as error:
        assert says in str(error) or "needs the plug-in 'remote'" in str(error), error
    else:
        raise AssertionError(wrong)
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """Processes that have imported nothing of ours, and so know of no plug-in yet."""
    with Forks("import torch, transformers.modeling_utils") as forks:
        yield forks


@pytest.mark.parametrize("beside", [False, pytest.param(True, marks=pytest.mark.plugin("remote"))])
def test_a_scheme_of_another_distribution(forks: Forks, tmp_path: Path, beside: bool) -> None:
    """Also beside one of ours that replaces the same function of transformers."""
    site = tmp_path / "site"
    for name, text in (
        ("vault/__init__.py", DECLARATION),
        ("vault/shelves.py", SHELVES),
        ("vault-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: vault\nVersion: 1.0\n"),
        ("vault-1.0.dist-info/entry_points.txt", "[hf_zero_stream.plugins]\nvault = vault:PLUGIN\n"),
    ):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    folder = make_checkpoint("qwen3_moe", tmp_path / "store" / "shelf" / "moe", torch.bfloat16)
    with ExitStack() as stack:
        urls = ["vault://shelf/moe/"]
        if beside:
            urls.append(stack.enter_context(http_files(folder)).address)
        forks.run(SCRIPT, str(site), str(folder), *urls, VAULT=str(tmp_path / "store"))
