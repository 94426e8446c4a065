"""Fixtures that every test may use."""

import gc
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.cluster import ENVIRONMENT, PAPER_GPUS, ROOT, run_ranks, warm_up
from tests.support.extensions import compile_extension


ON_PAPER = "tests/paper_gpu/"
OF_SHORT_TESTS = ("tests/core/", "tests/docs/", "tests/hostile/", "tests/support/")

STARTS_RANKS = {"cluster", "compiler", "async_io"}
"""Fixtures of tests that start ranks."""

# Before anything imports deepspeed or huggingface_hub in this process.
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

import pytest  # noqa: E402
import torch  # noqa: E402

from benchmarks.moe_checkpoint import make_moe_checkpoint  # noqa: E402
from benchmarks.venvs import vllm_on_cpu  # noqa: E402
from hf_zero_stream.registry import OURS  # noqa: E402
from scripts import system_packages  # noqa: E402
from scripts.system_packages import ASYNC_IO, COMPILER, HEADERS  # noqa: E402
from tests import sampling  # noqa: E402
from tests.paper_gpu import build as paper_gpu  # noqa: E402
from tests.support.sharded import even_model  # noqa: E402
from tests.support.zoo import make_checkpoint  # noqa: E402


MISSING = [name for name in OURS if not (ROOT / "hf_zero_stream" / "plugins" / name).is_dir()]
"""Plug-ins that have been taken away, as ``make core`` does."""

collect_ignore = MISSING  # the folders with their tests


def pytest_configure(config: pytest.Config) -> None:
    sampling.is_sample = "not slow" in config.getoption("markexpr")


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a plug-in that has been taken away. Mark rows of tests that start ranks as slow.

    So ``make test`` runs one row of such a test, and ``make test-all`` all rows.

    The marker ``sample(n)`` leaves n rows, as different as can be: each has a value that no row before it had. Rows
    that are marked as slow themselves are none of them: so a test says which of its rows are cheap.
    """
    lacking = [item for item in items if any(set(mark.args) & {*MISSING} for mark in item.iter_markers("plugin"))]
    if lacking:
        items[:] = [item for item in items if item not in lacking]
        config.hook.pytest_deselected(items=lacking)
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            is_sampled = STARTS_RANKS & set(item.fixturenames) or item.get_closest_marker("sample")
            if is_sampled and not item.get_closest_marker("slow"):
                tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for rows in tests.values():
        random.Random(0).shuffle(rows)  # else the first value of one parameter would meet all values of the others
        marker = rows[0].get_closest_marker("sample")
        most = marker.args[0] if marker else 1
        occurred: set[tuple[Any, ...]] = set()
        for row in rows:
            values = _values(row)
            if values <= occurred or most == 0:
                row.add_marker(pytest.mark.slow)
            else:
                most -= 1
            occurred |= values

    # What takes longest goes first, and files of short tests last: else a worker would be alone at the end.
    items.sort(key=lambda item: (not item.nodeid.startswith(ON_PAPER), item.nodeid.startswith(OF_SHORT_TESTS)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile``, one worker has all paper GPUs: only one has to start a fork server with them."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return ON_PAPER if nodeid.startswith(ON_PAPER) else str(super()._split_scope(nodeid))

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Leave what imports have made out of every later collection of garbage: that is most of what one looks at."""
    gc.collect()
    gc.freeze()


def _values(row: pytest.Function) -> set[tuple[Any, ...]]:
    """What each `parametrize` of a row's test gave it: the names, and which objects."""
    given = row.callspec.params
    together = [mark.args[0] for mark in row.iter_markers("parametrize")]
    names = [each.split(",") if isinstance(each, str) else each for each in together]
    return {tuple((name.strip(), id(given[name.strip()])) for name in each) for each in names}


def skip_if_lacking(*needs: system_packages.Need) -> None:
    """Skip, and say what to install. In CI, and where `make` could have installed it, the test must fail instead."""
    lacking = system_packages.lacking(*needs)
    if lacking and not system_packages.may_install() and not os.environ.get("CI"):
        pytest.skip(system_packages.explanation(lacking))


@pytest.fixture(scope="session")
def compiler() -> None:
    """What DeepSpeed compiles its communication between CPUs with: every process group of its on a CPU needs that."""
    skip_if_lacking(COMPILER, HEADERS)


@pytest.fixture(scope="session")
def cluster(compiler: None) -> None:
    """Warm fork server: keeps start-up out of the first test's time limit."""
    warm_up()


@pytest.fixture(scope="session")
def paper_gpus() -> None:
    """Ranks of `PAPER_GPUS`: see `tests/paper_gpu`."""
    lacking = paper_gpu.why_not()
    if lacking:
        pytest.skip(lacking)
    paper_gpu.build()
    warm_up(PAPER_GPUS)


@pytest.fixture(scope="session")
def even_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts in bf16, of sizes that 2 and 4 divide, in shards."""
    folder = tmp_path_factory.mktemp("even")
    even_model("qwen3_moe").bfloat16().save_pretrained(folder, max_shard_size="100KB")
    return folder


@pytest.fixture(scope="session")
def async_io(compiler: None) -> None:
    """DeepSpeed's asynchronous I/O, compiled: that may take longer than a test may."""
    skip_if_lacking(ASYNC_IO)
    run_ranks(1, compile_extension, "AsyncIOBuilder", timeout=900)


@pytest.fixture(scope="session")
def fused_adam(compiler: None) -> None:
    """DeepSpeed's FusedAdam, compiled: that may take longer than a test may."""
    run_ranks(1, compile_extension, "FusedAdamBuilder", timeout=900)


@pytest.fixture(scope="session")
def vllm() -> str:
    """The command of vLLM's CPU build, installed once into a venv of its own, which takes minutes."""
    return str(vllm_on_cpu())


@pytest.fixture(scope="session")
def zoo_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`zoo_checkpoint(name, dtype=torch.float32)` gives a zoo model's folder, written once per session."""
    made: dict[tuple[str, torch.dtype], Path] = {}

    def factory(name: str, dtype: torch.dtype = torch.float32) -> Path:
        if (name, dtype) not in made:
            folder = tmp_path_factory.mktemp(f"{name}-{str(dtype).removeprefix('torch.')}")
            made[name, dtype] = make_checkpoint(name, folder, dtype)
        return made[name, dtype]

    return factory


@pytest.fixture(scope="module")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The checkpoint of the documentation: two layers of eight experts, four shards."""
    return str(make_moe_checkpoint(tmp_path_factory.mktemp("cli") / "tiny-moe", 1e7, num_layers=2, num_experts=8))
