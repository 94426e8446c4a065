"""Ranks of tensor parallelism read what they hold columns of together: the same values, and each byte once."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

import hf_zero_stream
from benchmarks.moe_checkpoint import make_moe_checkpoint
from hf_zero_stream import StreamingConfig
from hf_zero_stream.destinations import columns
from hf_zero_stream.holdings.introspection import local_of
from hf_zero_stream.sources import local
from tests.faults import test_one_faulty_rank
from tests.faults.test_one_faulty_rank import fail_then_load, in_a_read, raising
from tests.sharded.test_plan_sharded import plan_of
from tests.support.cluster import run_ranks
from tests.support.sharded import Sizes, compare_sharded, load_sharded
from tests.support.zoo import ZOO, Checkpoint


TP = {"tp_size": 2}


@contextmanager
def two_ranks_exchange() -> Iterator[None]:
    """As if it were slow to read holes of local files."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(local, "READS_PER_EXCHANGE", 1)
        yield


@contextmanager
def small_exchanges() -> Iterator[list[Any]]:
    """Exchange what tiny models have, in many steps; yields the exchanges that are made."""
    calls: list[Any] = []
    original = dist.all_to_all_single

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    with two_ranks_exchange(), pytest.MonkeyPatch.context() as patches:
        patches.setattr(columns, "WORTH_BYTES", 1)
        patches.setattr(columns, "CHUNK_BYTES", 2048)
        patches.setattr(dist, "all_to_all_single", counted)
        yield calls


def compare_exchanged(
    name: str, folder: Path, of_sizes: list[Sizes], kwargs: dict[str, Any]
) -> tuple[list[dict[str, Any]], int]:
    with small_exchanges() as calls:
        return compare_sharded(ZOO[name].auto_class, folder, of_sizes, **kwargs), len(calls)


@pytest.mark.parametrize(
    ("name", "world_size", "of_sizes", "kwargs"),
    [
        ("llama", 2, [TP], {}),
        ("llama", 3, [{"tp_size": 3}], {"dtype": torch.bfloat16}),
        pytest.param(
            *("qwen3_moe", 4, [{"tp_size": 4}, {"dp_replicate_size": 2, "tp_size": 2}], {}), marks=pytest.mark.slow
        ),
        ("deepseek_v3", 4, [{"fsdp_size": 2, "tp_size": 2}, {"fsdp_size": 2, "tp_size": 2, "ep_size": 2}], {}),
    ],
)
def test_equals_plain_loading(
    cluster: None,
    zoo_checkpoint: Checkpoint,
    name: str,
    world_size: int,
    of_sizes: list[Sizes],
    kwargs: dict[str, Any],
) -> None:
    for found, exchanges in run_ranks(world_size, compare_exchanged, name, zoo_checkpoint(name), of_sizes, kwargs):
        for of_size in found:
            assert not of_size["differences"], of_size
        assert exchanges > 2 * len(of_sizes)


def reports_of(folder: Path, sizes: Sizes) -> tuple[list[Any], Any]:
    """This rank's, with exchanges, without, where values are compared, where rank 0 reads for all, and of a plan."""
    found, values = [], []

    def load(settings: dict[str, Any]) -> None:
        with hf_zero_stream.streaming(StreamingConfig(**settings)):
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=sizes)
        found.append(model.streaming_report.ranks[dist.get_rank()])
        values.append([local_of(param) for param in model.parameters()])

    with two_ranks_exchange():
        for settings in ({}, {"share_reads": False}, {"verify": "full"}):
            load(settings)
        planned = plan_of(folder, sizes, dist.get_rank()).load.cost
    for settings in ({"read_from": "rank0"}, {}):
        load(settings)
    assert all(torch.equal(*pair) for each in values for pair in zip(each, values[1], strict=True))
    return found, planned


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 MB, whose columns are worth an exchange; those of the zoo are not."""
    folder = tmp_path_factory.mktemp("mixture")
    make_moe_checkpoint(folder, 2e7, num_layers=2, num_experts=64)
    return folder


@pytest.mark.slow
def test_each_byte_is_read_once(cluster: None, mixture: Path) -> None:
    for (exchanged, alone, verified, relayed, by_default), planned in run_ranks(2, reports_of, mixture, TP):
        assert exchanged.bytes_read <= 1.01 * exchanged.bytes_needed
        assert alone.bytes_read > 1.2 * alone.bytes_needed
        assert verified.bytes_read == alone.bytes_read and verified.verification.elements
        assert relayed.bytes_needed == exchanged.bytes_needed
        assert (planned.bytes_read, planned.reads) == (exchanged.bytes_read, exchanged.reads)
        assert by_default.bytes_read == alone.bytes_read, "two ranks read the holes of local files faster"


def load(folder: Path, *args: Any, **settings: Any) -> Any:
    config = StreamingConfig(reader_threads=2, **settings)
    with hf_zero_stream.streaming(config), small_exchanges():
        return transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config={"tp_size": 2})


def fail_between_exchanges(folder: Path, own: Path) -> dict[str, Any]:
    test_one_faulty_rank.load = load  # type: ignore[assignment]
    with small_exchanges() as calls:
        load_sharded(transformers.AutoModelForCausalLM, folder, TP)
    reads = 2 * len(calls)
    return fail_then_load(folder, own, lambda _: in_a_read(own, raising(OSError(5, "Input/output error")), reads))


def test_a_read_fails_between_exchanges(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    for result in run_ranks(2, fail_between_exchanges, zoo_checkpoint("llama"), tmp_path, timeout=90):
        assert result["error"][0] == "ReadError" and "Input/output error" in result["error"][1], result
        assert result["loaded"] == 2 and not result["patched"]
