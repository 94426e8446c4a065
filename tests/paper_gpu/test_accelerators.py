"""Which device a rank uses, what is left alone on it, and builds of torch for CUDA where there is no GPU."""

import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_zero_stream
from hf_zero_stream import accelerators
from hf_zero_stream.ranks.coordinator import Coordinator
from tests.paper_gpu.trials import join_a_new_group, plain_model, zero_config, zero_model
from tests.support.cluster import PAPER_GPUS, ROOT, SOON_S, free_port, run_ranks, run_ranks_expecting_errors
from tests.support.forks import Forks
from tests.support.sharded import even_model


@pytest.mark.parametrize(
    ("count", "current", "local_rank", "expected"),
    [
        (8, 0, 5, 5),  # nobody has called set_device
        (8, 3, 5, 3),
        (1, 0, 5, 0),  # the launcher shows each rank its own GPU
        (8, 0, None, None),
        (1, 0, None, 0),
    ],
)
def test_device_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, count: int, current: int, local_rank: int | None, expected: int | None
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current)
    found = accelerators.device_of_rank("cuda", local_rank)
    assert found == (None if expected is None else torch.device("cuda", expected))


NO_GPU = """
import sys
import torch, transformers, hf_zero_stream
from hf_zero_stream import accelerators
from hf_zero_stream.seams.sharding import device_type
assert torch.accelerator.current_accelerator().type == "cuda" and not torch.cuda.is_available()
assert accelerators.kind() is None and device_type() == "cpu"
with hf_zero_stream.streaming():
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], distributed_config={"fsdp_size": 2})
assert {param.device.type for param in model.parameters()} == {"cpu"}, "as stock does it"
assert model.streaming_report.ranks[0].device_peak == 0
"""


@pytest.mark.slow
def test_a_build_for_cuda_without_a_gpu(paper_gpus: None, even_checkpoint: Path) -> None:
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    imports = "import tests.paper_gpu.cuda\nimport torch, transformers.modeling_utils"
    environment = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    with Forks(imports, environment=environment) as forks:
        numbers = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
        for rank in [forks.start(NO_GPU, str(even_checkpoint), **group, **number) for number in numbers]:
            rank.printed()


def load_unannounced(folder: Path) -> None:
    """As ranks do whom no launcher tells where they are, in a group that is bound to no device."""
    join_a_new_group()
    del os.environ["LOCAL_RANK"]
    zero_model(folder, zero_config(2, {}), {})


@pytest.mark.slow
def test_nobody_says_which_device(paper_gpus: None, even_checkpoint: Path) -> None:
    for outcome in run_ranks_expecting_errors(2, load_unannounced, even_checkpoint, on=PAPER_GPUS):
        assert outcome.error_type == "ConfigError", outcome.traceback
        assert "torch.cuda.set_device(...)" in outcome.error_message


def load_with_a_mistake(folder: Path, mistake: str) -> None:
    from hf_zero_stream.ranks import coordinator

    wrong = {"a host tensor": torch.device("cpu"), "the first device for all": torch.device("cuda", 0)}[mistake]
    coordinator.collective_device = lambda: wrong
    zero_model(folder, zero_config(3, {}), {})


@pytest.mark.parametrize(
    "mistake", ["a host tensor", pytest.param("the first device for all", marks=pytest.mark.slow)]
)
def test_mistakes_in_collectives_show(paper_gpus: None, even_checkpoint: Path, mistake: str) -> None:
    outcomes = run_ranks_expecting_errors(2, load_with_a_mistake, even_checkpoint, mistake, on=PAPER_GPUS, timeout=60)
    assert all(outcome.error_type is not None and outcome.seconds < SOON_S for outcome in outcomes)


def peaks(folder: Path) -> list[int]:
    """The user's peak, far above what a load needs: before a load, after it, and what the load reports."""
    torch.empty(10**8, dtype=torch.uint8, device="cuda")
    model = plain_model(folder).to("cuda")
    before = torch.cuda.max_memory_allocated()
    report = hf_zero_stream.load_into(model, str(folder))
    return [before, torch.cuda.max_memory_allocated(), report.ranks[0].device_peak, torch.cuda.memory_allocated()]


def test_a_load_leaves_statistics_alone(paper_gpus: None, even_checkpoint: Path) -> None:
    ((before, after, reported, used),) = run_ranks(1, peaks, even_checkpoint, on=PAPER_GPUS)
    assert after == before >= 10**8
    assert 0 < reported <= used


def digest_memory() -> tuple[bool, int]:
    from hf_zero_stream.saving.lazy_parameters import digest

    values = torch.arange(2**24, dtype=torch.int32)
    expected, on_device = digest(values), values.to("cuda")
    digest(on_device)  # makes the weights
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    return digest(on_device) == expected, torch.cuda.max_memory_allocated() - before


def test_digests_take_little_of_a_device(paper_gpus: None) -> None:
    ((is_same, nbytes),) = run_ranks(1, digest_memory, on=PAPER_GPUS)
    assert is_same and nbytes <= 14 * 2**20


def copies_in_an_agreement() -> int:
    """Bytes that come to the host when ranks tell each other something large."""
    from tests.paper_gpu.cuda import paper

    coordinator = Coordinator.of_default_group()
    copies, to = [], torch.Tensor.cpu
    torch.Tensor.cpu = lambda self: (copies.append(self.device.type), to(self))[1]
    with coordinator.watched():
        coordinator.all_gather("x" * 10_000)
    assert paper.faults() == []
    return copies.count("cuda")


def test_an_agreement_comes_to_the_host_in_one_copy(paper_gpus: None) -> None:
    """One for what is small, and one for what is not."""
    assert run_ranks(4, copies_in_an_agreement, on=PAPER_GPUS) == [2] * 4


def devices_of_a_late_choice(folder: Path) -> tuple[list[int], list[int]]:
    """The devices that this rank uses: after an agreement, and after it has chosen its own and loaded onto it."""
    from tests.paper_gpu.cuda import paper

    join_a_new_group()
    coordinator = Coordinator.of_default_group()
    with coordinator.watched():
        coordinator.all_gather("x" * 10_000)
    agreed = paper.contexts()
    torch.cuda.set_device(dist.get_rank())
    zero_model(folder, zero_config(3, {}), {})
    return agreed, paper.contexts()


def test_a_rank_uses_one_device_when_it_chooses_after_an_agreement(paper_gpus: None, even_checkpoint: Path) -> None:
    """A context takes hundreds of megabytes of a device, by each rank that has touched it: threads begin on the first.

    The group is bound to no device, and each process sees all of them.
    """
    found = run_ranks(2, devices_of_a_late_choice, even_checkpoint, on=PAPER_GPUS)
    assert found == [([0], [0]), ([1], [1])]


def run_example(folder: Path, sizes: list[str]) -> None:
    sys.argv = ["finetune_sharded.py", "--model", str(folder), *sizes, "--steps", "2"]
    runpy.run_path(str(ROOT / "examples" / "finetune_sharded.py"), run_name="__main__")


@pytest.mark.parametrize("sizes", [["--fsdp", "2"], pytest.param(["--tp", "2"], marks=pytest.mark.slow)], ids=" ".join)
def test_the_example_trains(paper_gpus: None, tmp_path: Path, sizes: list[str]) -> None:
    even_model("llama").save_pretrained(tmp_path)  # kernels of experts' grouped products are for real GPUs
    run_ranks(2, run_example, tmp_path, sizes, on=replace(PAPER_GPUS, sets_device=True))


def test_a_host_is_no_accelerator() -> None:
    devices: Any = [SimpleNamespace(type="cpu"), SimpleNamespace(type="meta")]
    assert not any(map(accelerators.is_accelerator, devices))
    accelerators.synchronise([torch.device("cpu")])
    assert accelerators.used_bytes(torch.device("cpu")) == accelerators.peak_bytes(torch.device("cpu")) == 0
