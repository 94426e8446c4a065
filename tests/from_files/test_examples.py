"""Commands that documents show: QLoRA with the Trainer, and TRL's SFT and DPO, with frozen weights in files."""

from pathlib import Path

import pytest

from tests.support.cluster import ROOT
from tests.support.commands import documented_commands, losses, run_command


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiler")]

PAGE = (ROOT / "docs" / "from_files.md").read_text()
MAKE, TRAIN = PAGE.partition("```bash\n")[2].partition("```")[0].splitlines()
SFT, DPO = [
    command
    for command in documented_commands((ROOT / "examples" / "finetune_trl.py").read_text().split('"""')[1])
    if "--method sft" in command or ("--method dpo" in command and "tiny-moe" in command)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    run_command(MAKE, folder)
    return folder


@pytest.mark.plugin("packed")
def test_the_page_trains_beside_a_quantised_mixture(folder: Path) -> None:
    from_files = run_command(TRAIN, folder)
    assert "stay in files" in from_files
    in_memory = run_command(TRAIN.replace("--frozen-weights files", "--frozen-weights memory"), folder)
    assert "stay in files" not in in_memory
    assert len(losses(from_files)) == 3 and losses(from_files) == losses(in_memory)


@pytest.mark.parametrize("command", [SFT, DPO], ids=["sft", "dpo"])
def test_trl_by_the_variable_alone(command: str, folder: Path) -> None:
    """Of DPO, the reference is the same model without its adapters."""
    from_files = run_command(f"HF_ZERO_STREAM_FROZEN_WEIGHTS=files {command}", folder)
    assert "stay in files" in from_files
    assert len(losses(from_files)) == 3 and losses(from_files) == losses(run_command(command, folder))
