"""What modules import and export, as far as the contracts of import-linter in ``pyproject.toml`` cannot say it."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_zero_stream
from hf_zero_stream import cli
from hf_zero_stream.bindings.install import ImportWatch
from tests.support.forks import Forks
from tests.support.zoo import Checkpoint


PACKAGE = Path(hf_zero_stream.__file__).parent
SOURCES = {
    ".".join(("hf_zero_stream", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
MODULES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}


def imports_of(module: str) -> Iterator[tuple[str, str]]:
    """(module, name) of each import anywhere in `module`, also inside functions; a module alone has no name."""
    package = module if SOURCES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            source = ".".join(filter(None, (base, node.module)))
            yield from ((source, alias.name) for alias in node.names)


def defined_in(module: str) -> set[str]:
    """The names that the code of `module` binds at its top level, or anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(MODULES[module]):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return found


@pytest.mark.plugin("stream")
def test_what_is_imported_of_our_own_is_there() -> None:
    """Imports in functions too; mypy takes a module of ours that is not there for one without types."""
    names = {module: defined_in(module) for module in MODULES}
    lacking = {
        (module, source, name)
        for module in MODULES
        for source, name in imports_of(module)
        if source.startswith("hf_zero_stream.") and f"{source}.{name}" not in MODULES
        if source not in MODULES or (name not in names[source] | {"", "*"})
    }
    assert lacking == set()


OF_ACCELERATORS = {"accelerator", "cuda", "xpu", "npu", "mps", "get_device_module", "Stream", "Event"}


@pytest.mark.parametrize("module", sorted(MODULES.keys() - {"hf_zero_stream.accelerators"}))
def test_one_module_asks_torch_about_accelerators(module: str) -> None:
    """So that kinds of accelerators differ in one place; annotations may name torch's classes."""
    parts = list(ast.walk(MODULES[module]))
    hints = [getattr(each, name, None) for each in parts for name in ("annotation", "returns")]
    annotated = {id(part) for hint in hints if hint is not None for part in ast.walk(hint)}
    asked = {
        part.attr
        for part in parts
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "torch"
        if id(part) not in annotated
    }
    asked |= {name for source, name in imports_of(module) if source == "torch"}
    asked |= {source.split(".")[1] for source, _ in imports_of(module) if source.startswith("torch.")}
    assert not asked & OF_ACCELERATORS


def test_two_watches_of_one_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is told, and neither asks the other without end."""
    (tmp_path / "watched_by_two.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    told: list[str] = []
    with (
        ImportWatch({"watched_by_two"}, lambda module: told.append("first")),
        ImportWatch({"watched_by_two"}, lambda module: told.append("second")),
    ):
        importlib.import_module("watched_by_two")
    assert sorted(told) == ["first", "second"]


# ------------------------------------------------------------------------------------------- what is not imported


STOCK_LOADS = """\
import sys, torch, transformers
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, PreTrainedModel
from hf_zero_stream import streaming

def imported():
    names = {name for name in sys.modules if name.startswith("hf_zero_stream.")}
    light = {f"hf_zero_stream.{name}" for name in ("holdings", "holdings.introspection", "holdings.own_names")}
    return {name.split(".")[1] for name in names - light}

def replaced():
    return [hasattr(vars(owner)[name], "__wrapped__") for owner, name in PLACES]

PLACES = ((PreTrainedModel, "from_pretrained"), (Accelerator, "save_model"))
plain = [vars(owner)[name] for owner, name in PLACES]
STREAM = {"engine", "checkpoint", "destinations", "holdings", "planning", "saving", "state"}
with streaming():
    assert all(replaced()), replaced()
    for folder in sys.argv[1:3]:
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert not model.streaming_report.streamed and "deepspeed" not in sys.modules
    assert not imported() & STREAM, imported()
with streaming():
    AutoModelForCausalLM.from_pretrained(sys.argv[1], strict=True)  # stock knows no such argument
    assert "engine" in imported()
AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert [vars(owner)[name] for owner, name in PLACES] == plain
assert "deepspeed" not in sys.modules
"""


RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.fixture(scope="module")
def with_transformers() -> Iterator[Forks]:
    """Processes that have imported torch and transformers, and nothing of ours."""
    with Forks("import torch, transformers.modeling_utils") as forks:
        yield forks


def test_loads_without_zero_import_nothing_that_streams(with_transformers: Forks, zoo_checkpoint: Checkpoint) -> None:
    """Nor DeepSpeed, as stock's; stock's ``save_pretrained`` does."""
    with_transformers.run(STOCK_LOADS, str(zoo_checkpoint("llama")), str(zoo_checkpoint("qwen3_moe")))


FIRST_LOAD = """\
import sys
import deepspeed
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # nothing is compiled
deepspeed.init_distributed("gloo", verbose=False)
config = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
import hf_zero_stream
with hf_zero_stream.streaming():
    assert AutoModelForCausalLM.from_pretrained(sys.argv[1]).streaming_report.streamed
ours = [name for name in sys.modules if name.startswith("hf_zero_stream")]
modules = [name for name in ours if not hasattr(sys.modules[name], "__path__")]  # packages are empty, or declarations
assert len(modules) <= 60, modules
rooms = {name.split(".")[1] for name in ours if "." in name}
assert not rooms & {"saving", "state", "cli"}, rooms
of_plugins = {name for name in ours if name.startswith("hf_zero_stream.plugins.") and name.count(".") > 2}
assert not of_plugins, of_plugins
"""


def test_a_first_load_under_zero_3_imports_only_what_it_uses(
    with_transformers: Forks, zoo_checkpoint: Checkpoint
) -> None:
    with_transformers.run(FIRST_LOAD, str(zoo_checkpoint("llama")), **RANK)


LATE = """\
import sys, torch
import hf_zero_stream
from transformers import AutoModelForCausalLM
with hf_zero_stream.streaming():
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    assert "deepspeed" not in sys.modules and "hf_zero_stream.state" not in sys.modules
    import deepspeed
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "optimizer": optimizer}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.save_checkpoint(sys.argv[2], tag="first")
assert not hasattr(type(engine).save_checkpoint, "__wrapped__")
assert not [finder for finder in sys.meta_path if type(finder).__name__ == "_Finder"]
"""


def test_deepspeed_may_be_imported_in_the_middle_of_a_block(
    with_transformers: Forks, zoo_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Its engines save as ours then too."""
    with_transformers.run(LATE, str(zoo_checkpoint("llama")), str(tmp_path), **RANK)
    assert (tmp_path / "first" / "model.safetensors").is_file()


def test_what_is_imported_in_a_block_is_replaced_there() -> None:
    """And put back with the rest; entering imports no other package, and of this one only what installs the table."""
    code = (
        "import sys\n"
        "from hf_zero_stream import streaming\n"
        "with streaming():\n"
        "    assert not {'torch', 'transformers', 'accelerate', 'deepspeed'} & set(sys.modules)\n"
        "    core = [name for name in sys.modules if name.startswith('hf_zero_stream') and '.plugins.' not in name]\n"
        "    assert len(core) < 18, core\n"
        "    from accelerate import Accelerator\n"
        "    assert all(hasattr(it, '__wrapped__') for it in (Accelerator.save_model, Accelerator.save_state))\n"
        "assert not hasattr(Accelerator.save_model, '__wrapped__')\n"
        "assert not {name for name in sys.modules if name.startswith('hf_zero_stream.state')}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.plugin("tools")
def test_what_needs_no_deepspeed_does_not_import_it(
    with_transformers: Forks, zoo_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """DeepSpeed takes seconds to import; the package, and commands that only look at files, must not wait for it."""
    folder, new = str(zoo_checkpoint("qwen3_moe")), str(tmp_path / "new")
    converting = [["convert", folder, new], ["convert", folder, new, "--layout", "hub"]]
    commands = [["verify", folder], *(converting if "convert" in cli.commands() else []), ["inspect", folder]]
    code = (
        "import sys\n"
        "import hf_zero_stream\n"
        "from hf_zero_stream.cli import app\n"
        "assert 'deepspeed' not in sys.modules, 'import'\n"
        f"for command in {commands!r}:\n"
        "    try:\n"
        "        app(command)\n"
        "    except SystemExit as end:\n"
        "        assert not end.code, command\n"
        "    assert 'deepspeed' not in sys.modules, command\n"
    )
    with_transformers.run(code)


WITHOUT_DEEPSPEED = """\
import sys
sys.modules["deepspeed"] = None
from typer.testing import CliRunner
from hf_zero_stream.cli import app
planned, refused, healthy = (
    CliRunner().invoke(app, words) for words in (["plan", PATH, "--fsdp", "2"], ["plan", PATH, "--world-size", "2"], \\
                                                 ["doctor"])
)
assert planned.exit_code == 0, planned.output
assert refused.exit_code == 1 and "needs DeepSpeed, which is not installed" in refused.output, refused.output
assert healthy.exit_code == 0 and "ZeRO-3" not in healthy.output, healthy.output
"""


@pytest.mark.plugin("tools", "forecast")
@pytest.mark.slow
def test_tools_without_deepspeed(with_transformers: Forks, zoo_checkpoint: Checkpoint) -> None:
    with_transformers.run(WITHOUT_DEEPSPEED.replace("PATH", repr(str(zoo_checkpoint("qwen3_moe")))))


# ------------------------------------------------------------------------------------------- whose private surface

PUBLIC = {
    "transformers": ("transformers", "transformers.utils"),
    "torch": (
        "torch",
        "torch.distributed",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "torch.nn",
        "torch.nn.parameter",
        "torch.optim.lr_scheduler",
        "torch.overrides",
        "torch.utils.checkpoint",
        # Private by their names; torch's documentation and libraries around torch use them.
        "torch.utils._pytree",
        "torch.utils._python_dispatch",
    ),
}
"""Modules that any room that may import the package may import from."""

HOMES = {
    # register_optimizer_step_pre_hook, and that of what comes after a step
    "torch.optim.optimizer": ("hf_zero_stream.bindings.history", "hf_zero_stream.saving.snapshot"),
    "torch.optim.swa_utils": ("hf_zero_stream.saving.beside",),  # AveragedModel
    "torch.utils.cpp_extension": ("hf_zero_stream.extensions",),
    "transformers.modeling_layers": ("hf_zero_stream.plugins.from_files.layers",),  # GradientCheckpointingLayer
    "transformers.models.auto": ("hf_zero_stream.auto",),
    "transformers.quantizers": ("hf_zero_stream.cli.models",),
    # HfDeepSpeedConfig, is_fsdp_enabled
    "transformers.integrations": ("hf_zero_stream.plugins.demo.demo_rank", "hf_zero_stream.loading.choice"),
    "torch.autograd": ("hf_zero_stream.holdings.replicas",),  # Variable._execution_engine
    "torch.distributed.distributed_c10d": (
        "hf_zero_stream.ranks.presence",
        "hf_zero_stream.plugins.forecast.fake_group",
    ),
    "torch.distributed.tensor.debug": ("hf_zero_stream.plugins.forecast.fake_group",),
    "torch.testing._internal.distributed.fake_pg": ("hf_zero_stream.plugins.forecast.fake_group",),
    "torch.distributed.fsdp._fully_shard._fsdp_param": ("hf_zero_stream.holdings.fsdp",),
    "torch.distributed.tensor._dtensor_spec": ("hf_zero_stream.holdings.fsdp",),
    "torch.multiprocessing.reductions": ("hf_zero_stream.plugins.stream.reads",),  # StorageWeakRef
}
"""Other modules, or names, and who may import them."""

OF_TRANSFORMERS = (
    "hf_zero_stream.seams",
    "hf_zero_stream.plugins.packed",
    "hf_zero_stream.plugins.hosts.trainers",
)
"""They may import anything of transformers."""


@pytest.mark.parametrize("module", MODULES)
def test_private_parts_of_other_packages_have_one_home(module: str) -> None:
    for source, name in imports_of(module):
        package = source.partition(".")[0]
        if package not in PUBLIC or (package == "transformers" and module.startswith(OF_TRANSFORMERS)):
            continue
        if (source in PUBLIC[package] and not name.startswith("_")) and f"{source}.{name}" not in HOMES:
            continue
        assert module in HOMES.get(source, ()) + HOMES.get(f"{source}.{name}", ()), f"{module}: {source} {name}"


def test_a_star_gives_what_is_public() -> None:
    names: dict[str, object] = {}
    exec("from hf_zero_stream import *", names)
    assert {"load_into", "save_pretrained", "streaming", "StreamingAutoModelForCausalLM"} <= set(names)
    assert not {"importlib", "Any", "annotations"} & set(names)


def test_completion_imports_nothing() -> None:
    """What a tab shows is short, and each name is there."""
    code = (
        "import sys, hf_zero_stream\n"
        "names = dir(hf_zero_stream)\n"
        "assert {'streaming', 'auto', 'load_into'} <= set(names) and len(names) < 30, names\n"
        "assert 'torch' not in sys.modules\n"
        "assert all(getattr(hf_zero_stream, name) for name in names)\n"
        "assert 'StreamingAutoModel' in dir(hf_zero_stream.auto)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
