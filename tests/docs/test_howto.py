"""The how-to pages are short, have the words that people type, and show what works.

Their commands run in the order of the pages, in one folder. Code with a file's name above it stands in that file, and
the file runs here or in the tests of the examples; other code runs in `test_readme.py`.
"""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.docs.test_readme import HOWTO, README, blocks
from tests.support.cluster import ROOT
from tests.support.commands import FSDP2_ON_CPU, losses, run_command


TYPED = (
    "OOM, OOM-killed, fewer GPUs, turn off, switch off, back to stock, migrate, upgrade, FAQ, Docker, Kubernetes, "
    "Slurm, wandb, verbosity, LoRA, QLoRA, vLLM, merge, resume, is it on"
)
"""What people look for, wherever it stands in these pages and README.md."""


ALL = "\n".join(HOWTO.values())
COMMANDS = list(dict.fromkeys(line for block in blocks("bash", ALL) for line in block.splitlines()))


def test_pages_are_ten_and_short() -> None:
    assert len(HOWTO) == 10
    assert {name: len(page.split()) for name, page in HOWTO.items() if len(page.split()) > 200} == {}


def test_readme_leads_to_each_before_the_reference() -> None:
    before, _, _ = README.partition("## Reference")
    assert [name for name in HOWTO if f"(docs/howto/{name}.md)" not in before] == []


def test_words_that_people_type_are_found() -> None:
    text = " ".join([README, (ROOT / "mkdocs.yml").read_text(), *HOWTO.values()]).lower()
    assert [word for word in TYPED.lower().split(", ") if not re.search(rf"\b{word}\b", text)] == []


def test_excerpts_stand_in_their_files() -> None:
    found = re.findall(r'^```python title="(.*?)"\n(.*?)^```$', ALL, re.M | re.S)
    assert len(found) >= 3
    for name, excerpt in found:
        assert excerpt in (ROOT / name).read_text(), name


def test_yaml_is_yaml() -> None:
    (manifest,) = re.findall(r"^  ```yaml\n(.*?)^  ```$", HOWTO["container"], re.M | re.S)
    found = yaml.safe_load(manifest)
    assert found["containers"][0]["volumeMounts"][0]["name"] == found["volumes"][0]["name"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("howto")


@pytest.fixture(scope="module")
def printed(compiler: None, folder: Path) -> dict[str, str]:
    """By command, what it printed."""
    return {command: run_command(command, folder) for command in ["python examples/tiny.py", *COMMANDS]}


def of(printed: dict[str, str], part: str) -> list[str]:
    return [output for command, output in printed.items() if part in command]


@pytest.mark.slow
def test_fewer_ranks_go_on(printed: dict[str, str]) -> None:
    first, fewer, *_ = of(printed, "resume_anywhere")
    assert "3 ranks began at tiny-moe" in first and "2 ranks began at run1/checkpoint-2" in fewer
    assert len(losses(first)) == 2 and losses(fewer)[:2] == losses(first)


@pytest.mark.slow
def test_adapters_train_beside_what_stays_quantised(printed: dict[str, str], folder: Path) -> None:
    in_fp8, in_nf4 = of(printed, "finetune_qlora")
    assert "keeps 12 weights quantised" in in_fp8 and "keeps, 8 weights quantised" in in_nf4
    assert len(losses(in_fp8)) == len(losses(in_nf4)) == 3
    (command,) = [command for command in COMMANDS if "tiny-moe-fp8" in command]
    dequantised = run_command(f"HF_ZERO_STREAM_KEEP_QUANTIZED=false {command}", folder, extra=["--output", "others"])
    assert losses(dequantised) == losses(in_fp8)
    assert load_file(folder / "adapters" / "adapter_model.safetensors").keys()


@pytest.mark.slow
def test_a_merged_adapter_is_that_of_one_process(printed: dict[str, str], folder: Path) -> None:
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(folder / "tiny-moe", dtype=torch.bfloat16)
    expected = PeftModel.from_pretrained(base, folder / "adapters").merge_and_unload().state_dict()  # type: ignore[operator]
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged").state_dict()
    assert merged.keys() == expected.keys()
    assert [name for name, value in merged.items() if not torch.equal(value, expected[name])] == []
    assert (folder / "merged" / "tokenizer.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--lora",)], ids=["all", "lora"])
def test_fsdp2_by_the_trainer(printed: dict[str, str], folder: Path, options: tuple[str, ...]) -> None:
    """On a CPU, where accelerate is told that it has accelerators (see ``fsdp2_on_cpu``)."""
    command = (
        "ACCELERATE_USE_FSDP=true torchrun --nproc_per_node 2 examples/finetune_fsdp2.py --model tiny-moe --data texts"
    )
    output = f"fsdp2{len(options)}"
    for steps in ("2", "4"):
        extra = ["--output", output, "--steps", steps, *options]
        found = losses(run_command(command, folder, extra=extra, search_path=[FSDP2_ON_CPU]))
        assert len(found) == int(steps)
    assert (folder / output / ("adapter_model" if options else "model")).with_suffix(".safetensors").is_file()


@pytest.mark.slow
def test_the_way_back_to_stock(printed: dict[str, str], folder: Path) -> None:
    *_, by_stock = of(printed, "resume_anywhere")
    assert "2 ranks began at run1/checkpoint-5" in by_stock and len(losses(by_stock)) == 6
    for step, is_ours in ((4, True), (5, False), (6, False)):
        assert (folder / f"run1/checkpoint-{step}/global_step{step}/training_state.json").is_file() == is_ours
    assert load_file(folder / "weights" / "model.safetensors").keys() >= {"lm_head.weight"}


@pytest.mark.slow
def test_a_line_and_a_report_say_that_it_is_on(printed: dict[str, str], folder: Path) -> None:
    (output,) = of(printed, "--report")
    (shown,) = [line for line in HOWTO["is-it-on"].splitlines() if line.startswith("hf_zero_stream: loaded")]
    pattern = re.sub(r"\d+(\\\.\d+)?(\\ [KMG]iB)?", r"[\\d.]+( [KMG]iB)?", re.escape(shown))
    assert re.search(f"^{pattern}$", output, re.MULTILINE), output
    (report,) = map(json.loads, (folder / "report.json").read_text().splitlines())
    assert report["kind"] == "load"
