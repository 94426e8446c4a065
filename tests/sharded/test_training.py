"""Models that were streamed into shards: their training, random numbers, and reads.

- Models that were streamed into shards train as plain ones do, and as those of stock do.
- A load leaves each rank the random numbers that its reference leaves: stock's, or under ZeRO-3 a plain load's.
- Ranks read for each other what several hold, or hold columns of: the same values, and each byte once.
"""

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
import transformers
from transformers.integrations import HfDeepSpeedConfig

import hf_zero_stream
from benchmarks.moe_checkpoint import make_moe_checkpoint
from hf_zero_stream import StreamingConfig
from hf_zero_stream.destinations import exchange
from hf_zero_stream.holdings.introspection import local_of
from hf_zero_stream.sources import local
from tests import sampling
from tests.faults import test_one_faulty_rank
from tests.faults.test_one_faulty_rank import fail_then_load, in_a_read, raising
from tests.support.cluster import run_ranks
from tests.support.fsdp2 import announce, count_lazy, make_accelerator
from tests.support.hosts import move_to_host
from tests.support.messages import outcome_of
from tests.support.parity import ds_config, whole_values
from tests.support.sharded import (
    Sizes,
    compare_sharded,
    even_inputs,
    even_model,
    load_sharded,
    plan_of,
    sharded_differences,
)
from tests.support.trainings import Training
from tests.support.zoo import ZOO, Checkpoint
from tests.sweep.loads import generators


CAUSAL = transformers.AutoModelForCausalLM


def three_losses(model: Any) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Training(model, optimizer, batch=lambda _: even_inputs()).train(range(3))


def train(folder: Path, of_sizes: list[Sizes]) -> list[Any]:
    """The losses of plain training, of stock's sharded model, and of ours, in each of the sizes."""
    transformers.utils.logging.set_verbosity_error()
    plain, found = three_losses(CAUSAL.from_pretrained(folder)), []
    for sizes in of_sizes:
        dist.barrier()
        stocks = partial(CAUSAL.from_pretrained, folder, distributed_config=dict(sizes))
        stock = outcome_of(lambda load=stocks: three_losses(load()))
        dist.barrier()
        ours = outcome_of(lambda sizes=sizes: three_losses(load_sharded(CAUSAL, folder, sizes)))
        found.append((sizes, plain, stock, ours))
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@pytest.mark.sample(1)
def test_losses(cluster: None, tmp_path: Path, name: str) -> None:
    even_model(name).save_pretrained(tmp_path)
    of_experts: list[Sizes] = [{"fsdp_size": 2, "ep_size": 2}] if name == "qwen3_moe" else []
    of_sizes: list[Sizes] = sampling.every(2, [{"fsdp_size": 2}, {"tp_size": 2}, *of_experts])
    for found in run_ranks(2, train, tmp_path, of_sizes):
        for sizes, plain, stock, ours in found:
            assert ours == stock, (sizes, stock, ours)
            assert len(set(plain)) == 3
            assert ours == pytest.approx(plain, abs=1e-6), sizes
    if sampling.is_sample:
        return
    for found in run_ranks(4, train, tmp_path, [{"dp_replicate_size": 2, "fsdp_size": 2}]):
        for sizes, plain, stock, ours in found:
            assert ours == stock and ours == pytest.approx(plain, abs=1e-6), (sizes, plain, stock, ours)


@pytest.mark.slow
def test_policies(cluster: None, tmp_path: Path) -> None:
    """Memory on the CPU, and 16-bit computing: as in stock, its errors included."""
    even_model("llama").save_pretrained(tmp_path)
    of_sizes: list[Sizes] = [
        {"fsdp_size": 2, "fsdp_cpu_offload": True},
        {"fsdp_size": 2, "fsdp_mixed_precision": True},
        {"fsdp_size": 2, "fsdp_cpu_offload": True, "fsdp_mixed_precision": True},
    ]
    for found in run_ranks(2, train, tmp_path, of_sizes):
        for sizes, _, stock, ours in found:
            assert ours == stock, (sizes, stock, ours)
        assert any(isinstance(ours, list) for _, _, _, ours in found)


def train_tied(folder: Path) -> dict[str, list[float]]:
    """The losses of plain training, of stock's shards, of ours, of ours that are cast, and of stock's filled anew."""
    transformers.utils.logging.set_verbosity_error()
    load = partial(CAUSAL.from_pretrained, folder)
    sizes: Sizes = {"fsdp_size": 2}
    losses = {"plain": three_losses(load()), "plain, cast": three_losses(load().double())}
    losses["stock"] = three_losses(load(distributed_config=dict(sizes)))
    losses["ours"] = three_losses(load_sharded(CAUSAL, folder, sizes))
    losses["ours, cast"] = three_losses(load_sharded(CAUSAL, folder, sizes).double())
    stocks = load(distributed_config=dict(sizes))
    hf_zero_stream.load_into(stocks, folder)
    losses["stock, filled"] = three_losses(stocks)
    return losses


def test_a_tied_head_of_odd_sizes(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """It stays one parameter. Of stock's, which FSDP2 pads, the two ends part in the first step, without a word."""
    for losses in run_ranks(2, train_tied, zoo_checkpoint("qwen3")):
        plain, stock = losses["plain"], losses["stock"]
        assert losses["ours"] == losses["stock, filled"] == plain and len(set(plain)) == 3
        assert losses["ours, cast"] == losses["plain, cast"]
        assert stock[0] == plain[0] and stock[1:] != plain[1:]


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def under_fsdp2(folder: Path, streams: bool, efficient: bool) -> list[str]:
    """The generators after loads of a model that lacks a head, and of one that lacks nothing."""
    announce(cpu_ram_efficient_loading=efficient)
    make_accelerator()
    found = []
    for name in ("AutoModelForSequenceClassification", "AutoModelForCausalLM"):
        for first in (5, 5 + dist.get_rank()):
            seed(first)
            with hf_zero_stream.streaming() if streams else nullcontext():
                model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32)
            assert (count_lazy(model) > 0) == streams
            found.append(generators())
    return found


@pytest.mark.parametrize("efficient", [True, False])
def test_as_stock_under_fsdp2(cluster: None, zoo_checkpoint: Checkpoint, efficient: bool) -> None:
    """With efficient loading stock draws on the first rank of a host alone."""
    stock, ours = (run_ranks(2, under_fsdp2, zoo_checkpoint("llama"), streams, efficient) for streams in (False, True))
    assert ours == stock
    has_drawn = [of_rank[0] != of_rank[2] for of_rank in stock]
    assert has_drawn == [True, not efficient]


def under_zero3(folder: Path) -> list[Any]:
    """Generators and the new head after a plain load, ours, stock's, and ours as stock's.

    The model's ``__init__`` calls ``torch.randn``.
    """
    as_stock = hf_zero_stream.StreamingConfig(random_numbers="stock")
    found = []
    for is_zero3, block in (
        (False, nullcontext()),
        (True, hf_zero_stream.streaming()),
        (True, nullcontext()),
        (True, hf_zero_stream.streaming(as_stock)),
    ):
        config = HfDeepSpeedConfig(ds_config(torch.float32)) if is_zero3 else None
        seed(5)
        before = generators()
        with block:
            model = transformers.ViTForImageClassification.from_pretrained(folder, dtype=torch.float32)
        assert generators() != before, "the head is new"
        found.append((generators(), whole_values(model)["classifier.weight"].tolist()))
        del model, config
        gc.collect()
    return found


def test_as_a_plain_load_under_zero3(cluster: None, tmp_path: Path) -> None:
    """Or, if it is asked for, as stock's under ZeRO-3, which draws more."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8)
    transformers.ViTModel(config).save_pretrained(tmp_path)
    for plain, ours, stock, as_stock in run_ranks(2, under_zero3, tmp_path):
        assert ours == plain and as_stock == stock != plain


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
        patches.setattr(exchange, "WORTH_BYTES", 1)
        patches.setattr(exchange, "CHUNK_BYTES", 2048)
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

    def load(settings: dict[str, Any], exchanges: bool = True) -> None:
        shares = nullcontext() if exchanges else mock.patch.object(exchange.Sharing, "takes", lambda *args: False)
        with hf_zero_stream.streaming(StreamingConfig(**settings)), shares:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=sizes)
        found.append(model.streaming_report.ranks[dist.get_rank()])
        values.append([local_of(param) for param in model.parameters()])

    with two_ranks_exchange():
        load({})
        load({}, exchanges=False)
        load({"verify": "full"})
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


@pytest.mark.plugin("forecast", "relay", "verify")
@pytest.mark.slow
def test_each_byte_is_read_once(cluster: None, mixture: Path) -> None:
    for (exchanged, alone, verified, relayed, by_default), planned in run_ranks(2, reports_of, mixture, TP):
        assert exchanged.bytes_read <= 1.01 * exchanged.bytes_needed
        assert alone.bytes_read > 1.2 * alone.bytes_needed
        assert verified.bytes_read == alone.bytes_read and verified.verification.elements
        assert relayed.bytes_needed == exchanged.bytes_needed
        assert (planned.bytes_read, planned.reads) == (exchanged.bytes_read, exchanged.reads)
        assert by_default.bytes_read == alone.bytes_read, "two ranks read the holes of local files faster"


HSDP: Sizes = {"dp_replicate_size": 2, "fsdp_size": 2}
FSDP_TP: Sizes = {"fsdp_size": 2, "tp_size": 2}
DDP_TP: Sizes = {"dp_replicate_size": 2, "tp_size": 2}


def bytes_read(folder: Path, of_sizes: list[Sizes], hosts: int, out: Path) -> list[float]:
    """What all ranks read for each byte of the checkpoint, and then of a state; values are those that were saved."""
    move_to_host("127.0.0.1" if hosts == 1 else f"127.0.0.{1 + dist.get_rank() % hosts}")
    found, plain = [], CAUSAL.from_pretrained(folder)
    for sizes in of_sizes:
        model = load_sharded(CAUSAL, folder, sizes)
        assert not (differences := sharded_differences(model, plain)), differences
        with torch.no_grad():
            for param in model.parameters():
                local_of(param).fill_(7)
        for report in (model.streaming_report, hf_zero_stream.load_into(model, folder)):
            found.append(sum(rank.bytes_read for rank in report.ranks) / report.checkpoint_bytes)
        assert not (differences := sharded_differences(model, plain)), differences
    model = load_sharded(CAUSAL, folder, HSDP)
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    hf_zero_stream.save_state(model, out, optimizer=optimizer, with_weights=False)

    def trained() -> dict[tuple[str, str], torch.Tensor]:
        of_names = {name: {"": param, **optimizer.state[param]} for name, param in model.named_parameters()}
        return {(name, key): local_of(it.detach()) for name, kept in of_names.items() for key, it in kept.items()}

    expected = {key: value.clone() for key, value in trained().items()}
    for value in trained().values():
        value.fill_(7)
    resumed = hf_zero_stream.load_state(model, out, optimizer=optimizer)
    assert [key for key, value in trained().items() if not torch.equal(value, expected[key])] == []
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, resumed.bytes_read)
    return [*found, sum(of_ranks) / sum(path.stat().st_size for path in out.glob("*/*.safetensors"))]


HSDP: Sizes = {"dp_replicate_size": 2, "fsdp_size": 2}
FSDP_TP: Sizes = {"fsdp_size": 2, "tp_size": 2}
DDP_TP: Sizes = {"dp_replicate_size": 2, "tp_size": 2}


def test_several_hosts_read_each_byte_once(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Replicas, and what tensor parallelism leaves whole; on one host the page cache serves the replicas."""
    trials = (zoo_checkpoint("llama"), [HSDP, FSDP_TP, DDP_TP])
    of_several = run_ranks(4, bytes_read, *trials, 2, tmp_path / "2")
    for several, one in zip(of_several, run_ranks(4, bytes_read, *trials, 1, tmp_path / "1"), strict=True):
        assert several[:6:2] == several[1:6:2] and one[:6:2] == one[1:6:2], "load_into reads as from_pretrained does"
        assert several[0] <= 1 and one[0] == pytest.approx(2 * several[0], rel=0.01)
        # Each reads the holes between its columns, which in this model are too small for an exchange.
        assert several[2] < one[2] < 1.25 and several[4] < 0.55 * one[4], (several, one)
        assert several[6] < 1.1 and one[6] > 1.8, (several, one)


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
