"""What README.md shows works: commands, code, settings and links."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_zero_stream
from tests.cluster import ROOT, run_ranks
from tests.test_examples import EXAMPLES, example_commands


README = (ROOT / "README.md").read_text()
HUB_NAME = "Qwen/Qwen3-30B-A3B"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines()]
SCRIPTS = [command for command in COMMANDS if command.startswith(("python ", "accelerate ", "torchrun "))]
TARGETS = [command.removeprefix("make ") for command in COMMANDS if command.startswith("make ")]


def test_every_command_is_checked_below() -> None:
    assert {"demo", "test"} <= set(TARGETS) and SCRIPTS
    assert set(COMMANDS) - set(SCRIPTS) - {f"make {target}" for target in TARGETS} == {"pip install -e ."}


def test_make_targets_exist() -> None:
    rules = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(TARGETS) <= set(rules)


def test_ci_runs_the_tests() -> None:
    ci = "\n".join(path.read_text() for path in (ROOT / ".ci").iterdir())
    assert re.search(r"^make\b.*\btest\b", ci, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^demo:.*\n\t.*-m examples\.demo$", makefile, re.MULTILINE)
    assert re.search(r"pip install .*-e ", makefile)


def test_counts_of_models_are_those_of_the_sweep() -> None:
    """The tool's own lines are at the head of the tables that it wrote."""
    table = (ROOT / "docs" / "models.md").read_text()
    built, not_built = map(int, re.search(r"(\d+) model types can be built; (\d+) cannot", table).groups())  # type: ignore[union-attr]
    assert f"{built} of {built + not_built} model types" in README
    ours = re.findall(r"^\| zero3x2 (\S+) \| (\d+) \| (\d+) \|(?:  \|){4}$", table, re.MULTILINE)
    assert ours == [(dtype, str(built), str(built)) for dtype in ("fp32", "bf16", "fp32-bf16")]
    stock = re.search(r"stock zero3x2 fp32 \| \d+ \| (\d+) \|  \| (\d+) \| (\d+) \|", table)
    assert "{} of them, differs for {} and raises for {}".format(*stock.groups()) in README  # type: ignore[union-attr]


def test_scripts_are_those_of_the_examples() -> None:
    """Which tests/test_examples.py runs, in this order."""
    documented = [command for example in EXAMPLES for command in example_commands(example)[1:]]
    assert SCRIPTS == list(dict.fromkeys(documented))


def test_names_exist() -> None:
    used = set(re.findall(r"\bhf_zero_stream\.(\w+)", "\n".join(blocks("python"))))
    for imported in re.findall(r"^from hf_zero_stream import (.+)$", "\n".join(blocks("python")), re.MULTILINE):
        used |= {name.strip() for name in imported.split(",")}
    used |= set(re.findall(r"`(StreamingAuto\w+)`", README))
    assert "StreamingAutoModelForCausalLM" in used and "plan" in used
    for name in used:
        assert getattr(hf_zero_stream, name) is not None


def run_blocks(sources: list[str], ds_config: dict[str, Any]) -> list[int]:
    """Execute code on a rank, with ZeRO-3 found as under a launcher; the blocks that gave a streamed model."""
    from transformers.integrations import HfDeepSpeedConfig

    found = HfDeepSpeedConfig(ds_config)
    streamed = []
    names: dict[str, Any] = {}
    for number, source in enumerate(sources):
        before = names.get("model")
        exec(compile(source, f"README.md, block {number}", "exec"), names)
        if names.get("model") is not before:
            assert names["model"].streaming_report.world_size == 2
            assert all(hasattr(param, "ds_tensor") for param in names["model"].parameters())
            streamed.append(number)
    assert found.is_zero3()
    return streamed


def test_code_runs(cluster: None, zoo_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Every block, one after the other, on two ranks, with a tiny checkpoint in place of the large one."""
    sources = blocks("python")
    checkpoint = str(zoo_checkpoint("qwen3_moe"))
    tiny = [source.replace(HUB_NAME, checkpoint).replace('"trained', f'"{tmp_path}/trained') for source in sources]
    loads = [number for number, source in enumerate(sources) if ".from_pretrained(" in source]
    assert len(loads) >= 4
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    assert run_ranks(2, run_blocks, tiny, config) == [loads, loads]
    assert {"trained", "trained-fp32"} <= {path.name for path in tmp_path.iterdir()}


def test_settings_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", README, re.MULTILINE)
    units = {"KiB": 2**10, "MiB": 2**20}
    shown: dict[str, Any] = {}
    for name, value in rows:
        number, _, unit = value.strip().partition(" ")
        if number.startswith("`"):
            shown[name] = number.strip('`"')
        elif number.isalpha():
            shown[name] = {"true": True, "false": False}[number]
        else:
            shown[name] = int(number) * units.get(unit, 1)
    assert shown == dataclasses.asdict(hf_zero_stream.StreamingConfig())


def test_settings_in_text_are_understood() -> None:
    (section,) = re.findall(r'"hf_zero_stream": (\{.*?\})', README)
    (variable, value) = re.search(r"`(HF_ZERO_STREAM_\w+)=(\w+)`", README).groups()  # type: ignore[union-attr]
    by_section = hf_zero_stream.StreamingConfig.resolve(ds_config={"hf_zero_stream": eval(section)}, environ={})
    by_variable = hf_zero_stream.StreamingConfig.resolve(environ={variable: value})
    assert by_section == by_variable == hf_zero_stream.StreamingConfig(staging_bytes=256 * 2**20)


def test_links_and_files_exist() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target.partition("#")[0]).exists(), target
    contributing = README[README.index("## Contributing") :]
    for line in re.findall(r"^\d+\. (.*?)(?=^\d+\. |^$)", contributing, re.MULTILINE | re.DOTALL):
        folder = re.match(r"`(\w+)/`:", line)
        for name in re.findall(r"`(\w+\.py)`", line):
            assert (ROOT / "hf_zero_stream" / (folder[1] if folder else "") / name).is_file(), name
