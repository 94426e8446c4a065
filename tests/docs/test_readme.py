"""What README.md and the pages for its readers show works: commands, code, settings, links, errors."""

import ast
import dataclasses
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers.integrations import HfDeepSpeedConfig
from typer.testing import CliRunner

import hf_zero_stream
import tests
from benchmarks.moe_checkpoint import make_moe_checkpoint
from hf_zero_stream import errors
from hf_zero_stream.cli import app
from scripts import errors_page
from scripts.check_package import pasted
from tests.docs.test_examples import EXAMPLES, example_commands
from tests.support.cluster import ROOT, run_ranks
from tests.support.zoo import Checkpoint


README = (ROOT / "README.md").read_text()
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("index", "use", "settings", "support")}
SHOWN = "\n".join([README, (ROOT / "CONTRIBUTING.md").read_text(), *PAGES.values()])
HOWTO = {
    name: (ROOT / "docs" / "howto" / f"{name}.md").read_text()
    for name in re.findall(r": howto/([\w-]+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
}
"""The how-to pages, in the order of the site."""
HUB_NAME = "Qwen/Qwen3-30B-A3B"


def blocks(language: str, text: str = SHOWN) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines()]
LAUNCHED = [command for command in COMMANDS if command.startswith(("python ", "accelerate ", "torchrun "))]
SCRIPTS = list(dict.fromkeys(LAUNCHED))
INSTALL = "pip install '.[deepspeed]'"
DEMO = "hf-zero-stream demo --keep tiny-moe"
PLAN = "hf-zero-stream plan tiny-moe --device-memory 80GiB"
TARGETS = [command.removeprefix("make ") for command in COMMANDS if command.startswith("make ")]


def test_every_command_is_checked_below() -> None:
    assert "test" in TARGETS and SCRIPTS
    others = set(COMMANDS) - set(SCRIPTS) - {f"make {target}" for target in TARGETS}
    assert others == {INSTALL, DEMO, PLAN}


def test_a_stranger_pastes_them_all() -> None:
    """`make stranger` does; make has its own environment."""
    commands = pasted()
    assert {INSTALL, DEMO, PLAN, "hf-zero-stream doctor"} <= set(commands)


def test_commands_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan` is run, of a smaller model; that `demo` has such an option, and its own tests run it."""
    make_moe_checkpoint(tmp_path / "tiny-moe", 0.01 * 1e9, num_layers=2, num_experts=8)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, shlex.split(PLAN)[1:])
    assert result.exit_code == 0 and "64" in result.stdout and "yes" in result.stdout
    assert "--keep" in CliRunner().invoke(app, ["demo", "--help"]).stdout


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_errors_on_the_page_are_those_of_the_code() -> None:
    """``python -m scripts.errors_page`` writes them, from docstrings that say when, and what to do."""
    kinds = [kind for name in errors.__all__ if isinstance(kind := getattr(errors, name), type)]
    assert all("\n\n" in (kind.__doc__ or "") for kind in kinds)
    assert errors_page.PAGE.read_text() == errors_page.page() and errors_page.page().count("\n- **`") == len(kinds)


def texts_of(path: Path) -> set[str]:
    """The strings in a module, with "..." where an f-string has a value."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            found.add("".join(str(it.value) if isinstance(it, ast.Constant) else "..." for it in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def test_messages_on_the_page_are_those_of_the_code() -> None:
    quoted = re.findall(r"^- `([^`]+)`[:,]", errors_page.PAGE.read_text(), re.MULTILINE)
    assert len(quoted) >= 3
    written = "\n".join(set().union(*map(texts_of, (ROOT / "hf_zero_stream").rglob("*.py"))))
    assert [message for message in quoted if message not in written] == []


def test_make_targets_exist() -> None:
    rules = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(TARGETS) <= set(rules)


def test_make_compat_runs_tests_that_there_are() -> None:
    printed = subprocess.run(["make", "--dry-run", "compat"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = re.findall(r"\btests/\S+?\.py", printed.stdout)
    assert len(paths) > 8 and [path for path in paths if not (ROOT / path).is_file()] == []


@pytest.mark.plugin("tools")
def test_issues_ask_for_what_doctor_gives() -> None:
    forms = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").iterdir())]
    assert all(form["name"] and form["description"] and form["body"] for form in forms)
    asked = "\n".join(field["attributes"].get("description", "") for form in forms for field in form["body"])
    (command,) = re.findall(r"`hf-zero-stream (doctor --bundle .*?)`", asked)
    offered = CliRunner().invoke(app, ["doctor", "--help"]).stdout
    assert all(option in offered for option in [*re.findall(r"--[\w-]+", command), *re.findall(r"`(--[\w-]+)", asked)])


def test_classifiers_are_true() -> None:
    """Of Python, those that the tests run on; and the package is typed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = re.findall(r":: Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert (
        f">={versions[0]}" == project["requires-python"] and f"{sys.version_info[0]}.{sys.version_info[1]}" in versions
    )
    assert "Typing :: Typed" in project["classifiers"] and (ROOT / "hf_zero_stream" / "py.typed").exists()


def test_nobody_is_sent_to_an_index_for_us() -> None:
    """Nothing of this name is there: somebody else's could be, one day."""
    folders = [ROOT / name for name in ("docs", "hf_zero_stream", "benchmarks", "examples", "notebooks")]
    found = [*ROOT.glob("*.md"), *(path for folder in folders for path in folder.rglob("*.*"))]
    for path in [path for path in found if path.suffix in (".md", ".py", ".ipynb")]:
        assert not re.search(r"pip install [^\n`]*hf[_-]zero[_-]stream", path.read_text()), path


def test_deepspeed_is_an_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert not [each for each in project["dependencies"] if each.startswith("deepspeed")]
    assert [each.partition(">")[0] for each in extras["deepspeed"]] == ["deepspeed"]
    assert "hf_zero_stream[deepspeed]" in extras["test"]


def test_ci_runs_the_tests() -> None:
    ci = "\n".join(path.read_text() for path in (ROOT / ".ci").iterdir())
    assert re.search(r"^make\b.*\btest\b", ci, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^demo:(?:.*\n\t)+.*/hf-zero-stream demo ", makefile, re.MULTILINE)
    assert re.search(r"pip install .*-e ", makefile)


def test_counts_of_models_are_those_of_the_sweep() -> None:
    """The tool's own lines are in the page beside the table that it wrote."""
    table = (ROOT / "docs" / "models.md").read_text()
    built, not_built = map(int, re.search(r"(\d+) model types can be built; (\d+) cannot", table).groups())  # type: ignore[union-attr]
    assert f"{built} of {built + not_built} model types" in PAGES["support"]
    ours = re.findall(r"^\| zero3x2 (\S+) \| equal (\d+) of (\d+) \|", table, re.MULTILINE)
    assert ours == [(dtype, str(built), str(built)) for dtype in ("fp32", "bf16", "fp32-bf16")]
    stock = re.search(r"\n\| zero3x2 fp32 \|.*\| equal (\d+) of \d+, differs (\d+), raises (\d+) \|\n", table)
    assert "{} of them, differs for {} and raises for {}".format(*stock.groups()) in PAGES["support"]  # type: ignore[union-attr]


def test_scripts_are_those_of_the_examples() -> None:
    """Which tests/docs/test_examples.py runs, in this order."""
    documented = [command for example in EXAMPLES for command in example_commands(example)[1:]]
    assert SCRIPTS == list(dict.fromkeys(documented))


def test_names_exist() -> None:
    used = set(re.findall(r"\bhf_zero_stream\.(\w+)", "\n".join(blocks("python"))))
    for imported in re.findall(r"^from hf_zero_stream import (.+)$", "\n".join(blocks("python")), re.MULTILINE):
        used |= {name.strip() for name in imported.split(",")}
    used |= set(re.findall(r"`(StreamingAuto\w+)`", SHOWN))
    assert "StreamingAutoModelForCausalLM" in used and "plan" in used
    for name in used:
        assert getattr(hf_zero_stream, name) is not None


def test_the_reference_has_all_that_is_exported() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    directives = set(re.findall(r"^::: \S+\.(\w+)$", page, re.MULTILINE)) | {"__version__"}
    assert directives >= set(dir(hf_zero_stream)) - {"auto"} and "`dir(hf_zero_stream.auto)`" in page
    assert {name for name in hf_zero_stream.__all__ if name.startswith("StreamingAuto")} <= set(
        dir(hf_zero_stream.auto)
    )


def test_the_reference_shows_code_as_code_and_nothing_of_ours_alone() -> None:
    """Google's style has "Examples:"; of another word the site makes a quotation of one line."""
    docstrings = "\n".join(path.read_text() for path in (ROOT / "hf_zero_stream").rglob("*.py"))
    assert "    Examples:\n        >>> " in docstrings and "    Example:\n" not in docstrings
    page = (ROOT / "docs" / "api.md").read_text()
    assert '"!^(staging_on|temporary_on|resolve)$"' in page
    assert "merge_init_into_class: true" in (ROOT / "mkdocs.yml").read_text(), "or streaming has no signature"


def run_blocks(sources: list[str], ds_config: dict[str, Any], folder: Path) -> list[int]:
    """Execute code on a rank, in `folder`, with ZeRO-3 found as under a launcher; the blocks that gave a model."""
    os.chdir(folder)
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


def test_code_runs(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Every block, one after the other, on two ranks, with a tiny checkpoint in place of the large one.

    Of the README, what its diff leads to.
    """
    (diff,) = blocks("diff")
    assert len([line for line in diff.splitlines() if line.startswith("+")]) == 3
    after = "".join(f"{line[1:]}\n" for line in diff.splitlines() if not line.startswith("-"))
    sources = [after, *blocks("python"), *blocks("python", "\n".join(HOWTO.values()))]
    checkpoint = str(zoo_checkpoint("qwen3_moe"))
    tiny = [source.replace(HUB_NAME, checkpoint) for source in sources]
    loads = [number for number, source in enumerate(sources) if ".from_pretrained(" in source]
    assert len(loads) >= 4
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    assert run_ranks(2, run_blocks, tiny, config, tmp_path) == [loads, loads]
    assert {"trained", "trained-fp32", "weights"} <= {path.name for path in tmp_path.iterdir()}


def test_settings_table() -> None:
    settings, _, _ = PAGES["settings"].partition("\n## Arguments of ")
    rows = re.findall(r"^\| `([a-z_]+)` \| ([^|]+) \|", settings, re.MULTILINE)
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
    (section,) = re.findall(r'"hf_zero_stream": (\{.*?\})', PAGES["settings"])
    (variable, value) = re.search(r"`(HF_ZERO_STREAM_\w+)=(\w+)`", PAGES["settings"]).groups()  # type: ignore[union-attr]
    by_section = hf_zero_stream.StreamingConfig.resolve(ds_config={"hf_zero_stream": eval(section)}, environ={})
    by_variable = hf_zero_stream.StreamingConfig.resolve(environ={variable: value})
    assert by_section == by_variable == hf_zero_stream.StreamingConfig(staging_bytes=256 * 2**20)


def test_links_lead_to_files() -> None:
    """Of the files beside README.md; `make docs` looks at those of docs/."""
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)]+)\)", (ROOT / name).read_text()):
            path, _, anchor = target.partition("#")
            assert (ROOT / path).exists(), target
            headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.MULTILINE) if anchor else []
            slugs = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
            assert not anchor or anchor in slugs, target


def test_every_page_is_on_the_site() -> None:
    listed = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    docs = ROOT / "docs"
    assert sorted(listed) == sorted(str(path.relative_to(docs)) for path in docs.rglob("*.md"))


def test_versions_agree() -> None:
    found = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None and found[1] == hf_zero_stream.__version__
    assert f"\nversion: {found[1]}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^## {found[1]} \(\d{{4}}-\d\d-\d\d\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_what_is_new_can_be_read_in_a_minute() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert len(changelog.split()) <= 600
    assert "### New for you" in changelog and "### You must change" in changelog


def test_folders_of_tests_are_described() -> None:
    """``tests/__init__.py`` names each of them, and none that is not there."""
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/__init__.py")}
    text = tests.__doc__ or ""
    assert {name for name in folders if f"``{name}``" not in text} == set()
    assert set(re.findall(r"^- ``(\w+)``", text, re.MULTILINE)) <= folders
