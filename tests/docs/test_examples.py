"""Examples and notebooks run, and docs/fits.md is what is written.

- The examples run exactly as their docstrings say, and give with streaming what they give without.
- Every notebook runs from top to bottom, and is committed with its outputs.
- docs/fits.md is what `benchmarks.fits` writes, and docs/who-reads.svg what `benchmarks.pictures` draws.
"""

import ast
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from accelerate import DeepSpeedPlugin
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks import fits, pictures
from benchmarks.sparse_checkpoint import make_sparse_checkpoint
from hf_zero_stream.settings.config import announces_fsdp2
from scripts.notebooks import NOTEBOOKS, execute
from tests.support.cluster import ROOT
from tests.support.commands import (
    FSDP2_ON_CPU,
    command_environment,
    documented_commands,
    losses,
    run_command,
    run_to_its_end,
)


EXAMPLES = ["finetune_accelerate.py", "finetune_trainer.py", "finetune_sharded.py"]
CONFIG_FOLDER = ROOT / "examples" / "accelerate"
CONFIGS = sorted(CONFIG_FOLDER.glob("zero3_*.yaml"))


def example_commands(example: str) -> list[str]:
    """An example's documented commands: on GPUs, making a checkpoint, and on a CPU."""
    source = (ROOT / "examples" / example).read_text()
    return documented_commands(source[: source.index('"""', 3)])


def example_on_cpu(example: str) -> str:
    """The end of an example's command for a CPU: the script and its arguments."""
    command = example_commands(example)[2]
    return command[command.index("examples/" + example) :]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where commands run; the first one writes the checkpoint that the others load."""
    folder = tmp_path_factory.mktemp("examples")
    run_command(example_commands(EXAMPLES[0])[1], folder)
    return folder


@pytest.mark.parametrize("example", EXAMPLES)
def test_docstring_shows_gpu_and_cpu_commands(example: str) -> None:
    on_gpu, make, on_cpu = example_commands(example)
    assert make == example_commands(EXAMPLES[0])[1]
    assert "--model Qwen/" in on_gpu and "--model tiny-moe" in on_cpu
    for command in (on_gpu, on_cpu):
        for word in command.split():
            if word.startswith("examples/"):
                assert (ROOT / word).is_file()


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.slow
def test_runs_as_documented(example: str, folder: Path) -> None:
    command = example_commands(example)[2]
    saved = folder / f"trained by {example}"
    streaming = run_command(command, folder, extra=["--output", str(saved)])
    trained = AutoModelForCausalLM.from_pretrained(saved)
    untrained = AutoModelForCausalLM.from_pretrained(folder / "tiny-moe")
    assert not torch.equal(trained.lm_head.weight, untrained.lm_head.weight)
    assert streaming.count("STREAMING LOAD REPORT (2 ranks") == 1
    stock = run_command(command, folder, extra=["--loader", "stock"])
    assert "STREAMING LOAD REPORT" not in stock
    assert len(losses(streaming)) == 3
    assert losses(streaming) == losses(stock)


@pytest.mark.parametrize("example", EXAMPLES)
def test_ends_its_process_group(example: str) -> None:
    tree = ast.parse((ROOT / "examples" / example).read_text())
    (main,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    assert ast.unparse(main.body[-1]) in ("torch.distributed.destroy_process_group()", "accelerator.end_training()")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_engages_zero3(path: Path, launched: Callable[[Path], tuple[Any, dict[str, str]]]) -> None:
    config = load_config_from_file(str(path))
    assert config.distributed_type == DistributedType.DEEPSPEED
    assert config.mixed_precision == ("no" if "gloo" in path.name else "bf16")  # the Trainer takes no bf16 on a CPU
    assert config.num_processes == (2 if "gloo" in path.name else 8)
    arguments, environment = launched(path)
    assert arguments.use_deepspeed and not arguments.cpu
    assert environment["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    assert environment["ACCELERATE_DEEPSPEED_ZERO3_INIT"] == "true"
    offload = "cpu" if "offload" in path.name else "none"
    assert environment["ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE"] == offload
    assert environment["ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"] == offload


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(CONFIG_FOLDER.glob("fsdp2_*.yaml")), ids=lambda path: path.name)
def test_fsdp2_config_trains(path: Path, folder: Path) -> None:
    """`accelerate launch` with a config of FSDP2, on two processes of a CPU (see ``fsdp2_on_cpu``)."""
    command = (
        f"accelerate launch --config_file {path.relative_to(ROOT)} --num_processes 2 {example_on_cpu(EXAMPLES[0])}"
    )
    saved = folder / f"trained with {path.name}"
    streaming, stock = (
        run_to_its_end(command, folder, "step 3: loss", extra=extra, search_path=[FSDP2_ON_CPU])
        for extra in (["--output", str(saved)], ["--loader", "stock"])
    )
    assert "STREAMING LOAD REPORT (2 ranks" in streaming and "STREAMING LOAD REPORT" not in stock
    assert len(losses(streaming)) == 3
    assert losses(streaming) == losses(stock)
    trained = AutoModelForCausalLM.from_pretrained(saved)
    untrained = AutoModelForCausalLM.from_pretrained(folder / "tiny-moe")
    assert not torch.equal(trained.lm_head.weight, untrained.lm_head.weight)


def test_config_announces_fsdp2(monkeypatch: pytest.MonkeyPatch) -> None:
    path = CONFIG_FOLDER / "fsdp2_gpu.yaml"
    command = ["--config_file", str(path), "--main_process_port", "0", "script.py"]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(command))
    assert arguments.use_fsdp and arguments.num_processes == 8
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        monkeypatch.delenv(name)
    assert not announces_fsdp2()
    for name, value in prepare_multi_gpu_env(arguments).items():
        monkeypatch.setenv(name, value)
    assert announces_fsdp2()
    monkeypatch.setenv("FSDP_VERSION", "1")
    assert not announces_fsdp2()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], tuple[Any, dict[str, str]]]:
    """What `accelerate launch --config_file path` makes of a config: its arguments, and the ranks' environment."""
    for name in list(os.environ):
        if name.startswith("ACCELERATE_"):
            monkeypatch.delenv(name)

    def launched(path: Path) -> tuple[Any, dict[str, str]]:
        command = ["--config_file", str(path), "--main_process_port", "0", "script.py"]
        arguments, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(command))
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        return arguments, prepare_deepspeed_cmd_env(arguments)[1]

    return launched


def test_plugin_finds_zero3_in_gpu_configs(
    launched: Callable[[Path], tuple[Any, dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in CONFIGS:
        for name, value in launched(path)[1].items():
            if name.startswith("ACCELERATE_"):
                monkeypatch.setenv(name, value)
        plugin = DeepSpeedPlugin()
        assert plugin.zero3_init_flag and plugin.hf_ds_config.is_zero3()
        assert plugin.hf_ds_config.is_offload() == ("offload" in path.name)


EXPECTED = {
    "quickstart.ipynb": [
        r"STREAMING LOAD REPORT \(2 ranks",
        r"stock, rank 1: host memory grew by at most \d+ MiB",
        r"streaming, rank 1: host memory grew by at most \d+ MiB",
        r"loss of one step: \d",
        r"saved [\d.]+ [MG]iB of weights in \d shards? to",
        r"reloaded: (\d+) of \1 partitions",
        r"memory: losses ([\d., ]+)\n(?s:.*)files: losses \1\n",
        r"frozen weights in files: host memory of rank 0 grew by at most \d+ MiB",
    ],
    "weight_stream.ipynb": [
        r"the engine got (\d+) tensors; \1 of \1 are what a gather gives",
        r"gathered, rank 1: [\d.]+ s, host memory grew by at most \d+ MiB",
        r"streamed, rank 1: [\d.]+ s, host memory grew by at most \d+ MiB",
    ],
}


def printed_by(notebook: Any) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs), "the memory curves"
    return "".join(output.text for output in outputs if output.output_type == "stream")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_is_committed_with_outputs(path: Path) -> None:
    """Of a whole run, in order, without what is this machine's."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == [*range(1, len(counts) + 1)]
    for pattern in EXPECTED[path.name]:
        assert re.search(pattern, printed_by(notebook)), pattern
    mine = re.compile(r"(?<!\w)/\w+/|/tmp/|/home/|/root/|\d{4}-\d\d-\d\d|stderr")  # absolute paths, dates, logs
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            output.get("data", {}).pop("image/png", None)
            assert not mine.search(str(output)), output
    assert all(cell.metadata.keys() <= {"id"} for cell in notebook.cells)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
@pytest.mark.slow
def test_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of its own, so that it cannot lean on the repository's files."""
    for name, value in command_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    printed = printed_by(execute(path, str(tmp_path)))
    for pattern in EXPECTED[path.name]:
        assert re.search(pattern, printed), printed


PAGE = (ROOT / "docs" / "fits.md").read_text()


def test_the_page_has_every_model_and_is_whole() -> None:
    head, *sections, on_one_gpu = PAGE.split("\n## ")
    assert head == fits.HEAD.rstrip("\n") + "\n"
    assert f"## {on_one_gpu}".startswith(fits.ONE_GPU)
    assert re.findall(r"^\| (\S+/\S+) \|", on_one_gpu, re.MULTILINE) == list(fits.MODELS)
    assert [section.partition("\n")[0] for section in sections] == list(fits.MODELS)
    for section in sections:
        rows = [
            line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith(("| all ", "| LoRA "))
        ]
        assert {(row[0], row[1].partition(",")[0]) for row in rows} == {
            (it, on) for it in ("all", "LoRA") for on in ("ZeRO-3", "FSDP2")
        }
        for cell in (cell for row in rows for cell in row[2:] if cell.strip()):
            (peak, host) = re.match(r"(\d+)(?:.*host (?:has )?(\d+))?", cell).groups("0")  # type: ignore[union-attr]
            assert cell == fits.need(int(peak), int(host))


@pytest.mark.parametrize(
    ("peak", "host", "text"),
    [
        (22, 57, "22"),
        (65, 57, "65 (tight)"),
        (82, 57, "82 (141 GB)"),
        (140, 57, "140 (141 GB, tight)"),
        (141, 57, "141 (no)"),
        (22, 1198, "22 (host 1198)"),
        (22, 12499, "22 (if a host has 12499)"),
    ],
)
def test_what_is_needed(peak: int, host: int, text: str) -> None:
    assert fits.need(peak, host) == text


def test_offload_is_planned_where_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
    )
    place = str(make_sparse_checkpoint(tmp_path / "llama", config))
    monkeypatch.setattr(fits, "GPUS", (2,))
    found = list(fits.rows(place))
    assert [(row.trains, row.engine) for row in found] == [
        (trains, engine) for trains in ("all", "LoRA") for engine in ("ZeRO-3", "FSDP2")
    ]
    assert all(row.on_host == "nothing" and row.fits("80 GB") for row in found)
    monkeypatch.setitem(fits.CARDS, "80 GB", 0)
    assert [row.on_host for row in fits.rows(place) if row.engine == "ZeRO-3"] == list(fits.OFFLOADS) * 2


@pytest.mark.slow
def test_the_figures_of_one_model_are_planned_again() -> None:
    model = "Qwen/Qwen3-30B-A3B"
    folder = make_sparse_checkpoint(fits.CACHE / "qwen3-30b-a3b-bf16", fits.MODELS[model]())
    assert fits.section(model, list(fits.rows(str(folder)))) in PAGE


@pytest.mark.slow
def test_the_picture_of_who_reads_what_is_drawn_again() -> None:
    """What `make pictures` draws: the file in docs/."""
    picture = (ROOT / "docs" / "who-reads.svg").read_text()
    assert pictures.as_svg(pictures.who_reads()) == picture
    assert "each rank reads its own 7.1 GiB" in picture
