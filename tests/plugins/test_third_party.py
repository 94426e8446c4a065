"""A plug-in of somebody else, installed as a distribution of its own: nothing of this package is edited for it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import transformers

from tests.support.cluster import ROOT
from tests.support.forks import Forks
from tests.support.http_files import http_files
from tests.support.saving import SHARD_SIZE, different
from tests.support.zoo import Checkpoint


DISTRIBUTION = Path(__file__).parent / "distribution"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the plug-in."""
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    copy = tmp_path_factory.mktemp("source") / "odd_things"
    subprocess.run(["cp", "-r", str(DISTRIBUTION), str(copy)], check=True)  # a build writes beside the source
    subprocess.run([*pip, "--target", str(folder), str(copy)], check=True)
    return folder


def run(site: Path, *command: str, **environ: str) -> str:
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}", **environ}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


def test_a_command(site: Path, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"four")
    command = [sys.executable, "-m", "hf_zero_stream"]
    assert run(site, *command, "weigh", str(tmp_path / "x")) == "4 bytes\n"
    assert "weigh" in run(site, *command, "--help")


FORMAT_AND_SOURCE = """\
import sys
import torch
import hf_zero_stream
model = torch.nn.Module()
for name in ("first", "second"):
    model.register_buffer(name, torch.zeros(5, dtype=torch.uint8))
assert "odd_things.raw" not in sys.modules and "odd_things.vault" not in sys.modules
hf_zero_stream.load_tensors(model, [sys.argv[1], "vault://shelf/second.raw"])
print(bytes(model.first.tolist()), bytes(model.second.tolist()))
"""


def test_a_format_and_a_source(site: Path, tmp_path: Path) -> None:
    (tmp_path / "shelf").mkdir()
    for name in ("first", "shelf/second"):
        (tmp_path / f"{name}.raw").write_bytes(f"{Path(name).name:5.5}".encode())
    command = [sys.executable, "-c", FORMAT_AND_SOURCE, str(tmp_path / "first.raw")]
    assert run(site, *command, VAULT=str(tmp_path)) == "b'first' b'secon'\n"


SCHEME = """\
import sys
sys.path.insert(0, sys.argv[1])
import torch, transformers, hf_zero_stream
from typer.testing import CliRunner
from hf_zero_stream.cli import app
from hf_zero_stream.errors import UrlError
auto = transformers.AutoModelForCausalLM
plain = auto.from_pretrained(sys.argv[2]).state_dict()
with hf_zero_stream.streaming():
    assert not [name for name in sys.modules if name.startswith("odd_things.")]
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


@pytest.mark.plugin("tools", "forecast")
@pytest.mark.parametrize("beside", [False, pytest.param(True, marks=pytest.mark.plugin("remote"))])
def test_a_scheme(site: Path, forks: Forks, zoo_checkpoint: Checkpoint, tmp_path: Path, beside: bool) -> None:
    """Loads and commands read from its URLs, also beside one of ours that replaces the same function."""
    (tmp_path / "shelf").mkdir()
    (tmp_path / "shelf" / "moe").symlink_to(folder := zoo_checkpoint("qwen3_moe", torch.bfloat16))
    with ExitStack() as stack:
        urls = ["vault://shelf/moe/"]
        if beside:
            urls.append(stack.enter_context(http_files(folder)).address)
        forks.run(SCHEME, str(site), str(folder), *urls, VAULT=str(tmp_path))


DESTINATION = """\
import sys
import torch.distributed as dist
import hf_zero_stream
from transformers import AutoModelForCausalLM
dist.init_process_group("gloo")
with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(destination="columns", progress=False)):
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    assert model.lm_head.weight.shape[1] in (17, 18) and model.config.hidden_size == 35
    hf_zero_stream.save_pretrained(model, sys.argv[2], max_shard_size=SHARD_SIZE)
"""


def test_a_destination_and_what_saves_from_it(site: Path, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder, script = zoo_checkpoint("llama"), tmp_path / "script.py"
    script.write_text(DESTINATION.replace("SHARD_SIZE", repr(SHARD_SIZE)))
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder)
    whole.save_pretrained(tmp_path / "whole", max_shard_size=SHARD_SIZE)
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    run(site, *ranks, str(folder), str(tmp_path / "saved"))
    assert different(tmp_path / "saved", tmp_path / "whole") == []


def test_a_destination_that_nobody_brings(site: Path, zoo_checkpoint: Checkpoint) -> None:
    code = DESTINATION.replace('dist.init_process_group("gloo")\n', "").replace('"columns"', '"rows"')
    command = [sys.executable, "-c", code, str(zoo_checkpoint("llama")), ""]
    with pytest.raises(subprocess.CalledProcessError) as error:
        run(site, *command)
    assert "destination: expected one that a plug-in brings (columns); got 'rows'" in error.value.stderr


BROKEN = {
    "absent-thing": ("gone = no_such_module:PLUGIN", "ModuleNotFoundError: No module named 'no_such_module'"),
    "exiting-thing": ("exits = exits_at_import:PLUGIN", "SystemExit: 3"),
    "old-thing": ("old = of_another_version:PLUGIN", "unexpected keyword argument 'wheels'"),
    "typed-thing": ("typed = of_other_types:PLUGIN", "Plugin(rows=...): expected a Mapping, found ['a row']"),
    "no-thing": ("nothing = json:encoder", "expected a Plugin, found <module 'json.encoder'"),
    "strange-thing": ("strange = not a place", "strange of strange-thing (not a place: "),
}
"""Distributions whose plug-ins cannot be imported: their entry points, and what is said of each."""

MODULES = {
    "exits_at_import": "raise SystemExit(3)",
    "of_another_version": "from hf_zero_stream.registry import Plugin\nPLUGIN = Plugin('old', wheels=4)",
    "of_other_types": "import json\nfrom hf_zero_stream.registry import Plugin\nPLUGIN = Plugin('t', rows=['a row'])",
    "two_in_one": "from hf_zero_stream.registry import Plugin\n"
    "ONE, OTHER = (Plugin('one', commands={name: 'no_command'}) for name in ('first', 'second'))",
}


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A folder with distributions of broken plug-ins, and one of two that are whole."""
    entries = {name: text for name, (text, _) in BROKEN.items()}
    entries["two-things"] = "one = two_in_one:ONE\nother = two_in_one:OTHER"
    for name, text in entries.items():
        info = tmp_path / f"{name.replace('-', '_')}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[hf_zero_stream.plugins]\n{text}\n")
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


BESIDE_BROKEN = """\
import sys, torch, transformers, hf_zero_stream
from hf_zero_stream.cli import commands
from hf_zero_stream.registry import plugins
with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(progress=False)):
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
print([plugin.name for plugin in plugins() if plugin.name == "one"], {"first", "second"} <= {*commands()})
"""


def test_broken_ones_break_nothing(broken: Path, zoo_checkpoint: Checkpoint) -> None:
    """Each is named once, with its distribution and its error; of two in one module, of one name, none is lost."""
    command = [sys.executable, "-c", BESIDE_BROKEN, str(zoo_checkpoint("llama"))]
    environment = {**os.environ, "PYTHONPATH": f"{broken}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    assert done.stdout == "['one', 'one'] True\n"
    assert done.stderr.count("Installed plug-ins that cannot be imported") == 1
    for name, (_, why) in BROKEN.items():
        assert f" of {name} (" in done.stderr and why in done.stderr, done.stderr


@pytest.mark.plugin("tools")
def test_what_needs_a_broken_one_says_so(broken: Path, zoo_checkpoint: Checkpoint) -> None:
    """A destination, a scheme, a command that nobody else brings; and commands whose modules are not there."""
    environment = {**os.environ, "PYTHONPATH": f"{broken}{os.pathsep}{ROOT}"}
    load = DESTINATION.replace('dist.init_process_group("gloo")\n', "").replace("SHARD_SIZE", "1")
    inspect = [sys.executable, "-m", "hf_zero_stream"]
    for command, says in (
        ([sys.executable, "-c", load, str(zoo_checkpoint("llama")), ""], "expected one that a plug-in brings"),
        ([*inspect, "inspect", "vault://shelf/moe"], "vault://shelf/moe"),
        ([*inspect, "weigh"], "hf-zero-stream weigh: no such command"),
    ):
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode and says in done.stderr, done.stderr
        assert "gone of absent-thing (no_such_module:PLUGIN: Mod" in done.stderr.partition(says)[2], done.stderr
    done = subprocess.run([*inspect, "first"], capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and "MissingPluginError: no_command, which a plug-in" in done.stderr
    done = subprocess.run([*inspect, "--help"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "first" in done.stdout and "inspect" in done.stdout
