"""The checkpoint that tests of commands look at."""

import pytest

from benchmarks.moe_checkpoint import make_moe_checkpoint


@pytest.fixture(scope="module")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The checkpoint of the documentation: two layers of eight experts, four shards."""
    return str(make_moe_checkpoint(tmp_path_factory.mktemp("cli") / "tiny-moe", 1e7, num_layers=2, num_experts=8))
