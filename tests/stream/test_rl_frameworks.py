"""The frameworks themselves, each in an environment of its own: what engines get, with and without streaming()."""

from pathlib import Path

import pytest

from benchmarks.clients.arms import FRAMEWORKS, environment_for, faults_of
from benchmarks.moe_checkpoint import make_moe_checkpoint


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "name"),
    [
        ("openrlhf", "broadcast"),
        ("openrlhf", "colocated"),
        ("verl", "fsdp2"),
        ("verl", "fsdp2_lora"),
        ("checkpoint-engine", "parameter_server"),
    ],
)
def test_as_stock(tmp_path: Path, framework: str, name: str) -> None:
    make_moe_checkpoint(tmp_path / "model", 1e6, num_layers=2, num_experts=4)
    faults, _ = faults_of(name, FRAMEWORKS[framework].clients[name], environment_for(framework), tmp_path)
    assert faults == []
