"""verify="full" finds any wrong element in any home, and gives a model one number at every world size."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file

import hf_zero_stream
from hf_zero_stream.checkpoint.digests import BLOCK, digest_of_values
from hf_zero_stream.checkpoint.formats import read_map
from hf_zero_stream.checkpoint.lazy import LazyTensor
from hf_zero_stream.checkpoint.nodes import HostTensor
from hf_zero_stream.destinations import exchange
from hf_zero_stream.engine import reader as reading
from hf_zero_stream.plugins.verify import verification
from hf_zero_stream.plugins.verify.verification import Lookup
from hf_zero_stream.sources.local import LocalFiles
from tests.support.cluster import SOON_S, Outcome, run_ranks, run_ranks_expecting_errors
from tests.support.homes import make_even_llama
from tests.support.parity import ds_config
from tests.support.quantised_checkpoints import fp8, mxfp4
from tests.support.zoo import Checkpoint


HOMES: dict[str, dict[str, Any] | None] = {
    "zero3": {"stage": 3},
    "offload": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": False}},
    "stage 2": {"stage": 2},
    "replicated": None,
}


def load(folder: Path, home: str, how: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A model in one of the homes."""
    zero = HOMES[home]
    section: dict[str, Any] = {"hf_zero_stream": {"verify": how, "share_reads": True}}
    if zero is None:
        with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(verify=how, share_reads=True)):
            return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    config = {**ds_config(dtype), "zero_optimization": zero, **section}
    return hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(folder, dtype=dtype, ds_config=config)


def verified(folder: Path, homes: list[str], how: str) -> list[dict[str, Any]]:
    reports = [load(folder, home, how).streaming_report for home in homes]
    return [{"digest": report.digest, "table": report.table(), **report.to_dict()} for report in reports]


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_digest_is_the_same_in_every_home_and_world(cluster: None, zoo_checkpoint: Checkpoint, name: str) -> None:
    """Casts to bfloat16, fused experts and transposed layouts included."""
    digests = set()
    for world_size, homes in ((1, ["zero3"]), (2, list(HOMES)), (3, ["zero3", "replicated"])):
        for reports in run_ranks(world_size, verified, zoo_checkpoint(name), homes, "full"):
            for report in reports:
                digests.add(report["digest"])
                assert f"digest {report['digest']}" in report["table"]
                for rank in report["ranks"]:
                    done = rank["verification"]
                    assert done["how"] == "full" and done["elements"] > 0
                    assert done["bytes_read"] <= 1.01 * rank["bytes_read"], "one more pass at most"
    assert len(digests) == 1 and len(digests.pop()) == 16


def test_a_sample_is_small(cluster: None, zoo_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    for reports in run_ranks(2, verified_in_small_samples, zoo_checkpoint("qwen3_moe")):
        (report,) = reports
        assert report["digest"] == "" and "Verified (sample)" in report["table"]
        for rank in report["ranks"]:
            assert 0 < rank["verification"]["bytes_read"] < rank["bytes_read"] / 2
            assert rank["verification"]["parameters"] > 10


def verified_in_small_samples(folder: Path) -> Any:
    verification.SAMPLE = 16
    return verified(folder, ["zero3"], "sample")


def load_and_corrupt(folder: Path, home: str, how: str, where: str) -> Any:
    """Rank 1 gets one wrong element, either where it puts what it read or (replicated) in what others sent it."""
    if dist.get_rank() == 1 and where == "placed":
        real = reading.execute_reads

        def corrupting(plan: Any, destinations: Any, *args: Any, **kwargs: Any) -> Any:
            times = real(plan, destinations, *args, **kwargs)
            if plan.targets:
                number = max(range(len(plan.targets)), key=lambda number: plan.targets[number].stop)
                destinations[number][5] += 1
            return times

        reading.execute_reads = corrupting
    if dist.get_rank() == 1 and where == "sent":
        real_gather = exchange.all_gather

        def flipping(everyone: torch.Tensor, mine: torch.Tensor, **kwargs: Any) -> Any:
            work = real_gather(everyone, mine, **kwargs)
            work.wait()
            everyone[3] ^= 64
            return work

        exchange.all_gather = flipping
    return load(folder, home, how)


@pytest.mark.parametrize(
    ("home", "where"),
    [("zero3", "placed"), ("offload", "placed"), ("stage 2", "placed"), ("replicated", "placed"), ("stage 2", "sent")],
)
def test_one_wrong_element_is_found(cluster: None, zoo_checkpoint: Checkpoint, home: str, where: str) -> None:
    outcomes: list[Outcome] = run_ranks_expecting_errors(
        2, load_and_corrupt, zoo_checkpoint("qwen3_moe"), home, "full", where
    )
    for outcome in outcomes:
        assert outcome.error_type == "LoadError", outcome.traceback
        message = str(outcome.error_message)
        assert "verify: model." in message or "verify: lm_head" in message
        assert "on rank 1" in message and "elements" in message
        assert outcome.seconds < SOON_S


def test_without_verification_it_goes_unnoticed(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """What the test above would prove nothing without."""
    outcomes = run_ranks_expecting_errors(2, load_sizes_and_corrupt, zoo_checkpoint("qwen3_moe"))
    assert [outcome.error_type for outcome in outcomes] == [None, None]
    assert outcomes[0].value["how"] == "sizes"


def load_sizes_and_corrupt(folder: Path) -> Any:
    model = load_and_corrupt(folder, "zero3", "sizes", "placed")
    return model.streaming_report.to_dict()["ranks"][0]["verification"]


# ------------------------------------------------------------------------------------------------ the digest itself


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128])
def test_digests_of_parts_add_up(dtype: torch.dtype) -> None:
    values = torch.randn(2 * BLOCK + 1001, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = (100 * values).to(torch.int64).to(dtype)
    whole = digest_of_values(values, 0)
    for cut in (0, 1, 777, BLOCK - 1, BLOCK, BLOCK + 5, len(values)):
        assert (digest_of_values(values[:cut], 0) + digest_of_values(values[cut:], cut)) % 2**64 == whole


def test_digests_differ() -> None:
    values = torch.randn(2 * BLOCK + 9, generator=torch.Generator().manual_seed(0))
    swapped, shifted, changed = values.clone(), values.roll(1), values.clone()
    swapped[:BLOCK], swapped[BLOCK : 2 * BLOCK] = values[BLOCK : 2 * BLOCK], values[:BLOCK]
    changed.view(torch.int32)[-1] ^= 1
    found = {digest_of_values(tensor, 0) for tensor in (values, swapped, shifted, changed, values[1:])}
    assert len(found | {digest_of_values(values, 1)}) == 6


# --------------------------------------------------------------------------------------------------- looking up


def test_lookup_agrees_with_torch() -> None:
    """Views, concatenations and casts of every kind, against the same ops on real values."""
    torch.manual_seed(0)
    first, second = torch.randn(6, 4, 10), torch.randn(6, 4, 3)

    def ops(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return [
            a,
            a[1:5, 2],
            a.transpose(0, 2),
            a.permute(2, 0, 1)[::3],
            torch.cat([a, b], dim=2),
            torch.cat([a.transpose(1, 2)[:, 2:5].transpose(1, 2), b], dim=0),
            torch.stack([a, a.to(torch.bfloat16).to(torch.float32)]).flatten(0, 1).transpose(0, 1),
            torch.cat([a, b], dim=2).transpose(0, 1).contiguous()[:, 1:].to(torch.float16),
        ]

    lazies = [lazy_of(tensor) for tensor in (first, second)]
    lookup = Lookup(LocalFiles(), lambda view: pytest.fail("no function is involved"))
    for expected, lazy in zip(ops(first, second), ops(*lazies), strict=True):
        flat = expected.reshape(-1)
        for start, stop in ((0, len(flat)), (0, 0), (5, 6), (7, len(flat) - 3)):
            found = lookup.values(lazy.view_of_node, range(start, stop))
            assert found.dtype == expected.dtype and torch.equal(found, flat[start:stop])


def lazy_of(tensor: torch.Tensor) -> Any:
    return LazyTensor.whole(HostTensor.of(tensor), no_values)


def no_values(view: Any) -> torch.Tensor:
    pytest.fail("nothing is materialised")


def test_lookup_reads_a_transposed_tensor_once(tmp_path: Path) -> None:
    values = torch.arange(300 * 700, dtype=torch.float32).view(300, 700)
    save_file({"x": values}, tmp_path / "x.safetensors")
    index = read_map([tmp_path / "x.safetensors"])
    lazy = index.slices(lambda view: pytest.fail("nothing is materialised"))["x"][...].t()
    with closing(LocalFiles(index.shards)) as files:
        lookup = Lookup(files, lambda view: pytest.fail("no function is involved"))
        chunks = [range(start, start + 21_000) for start in range(0, 210_000, 21_000)]
        parts = [lookup.values(lazy.view_of_node, chunk) for chunk in chunks]
        assert torch.equal(torch.cat(parts), values.t().reshape(-1))
        assert files.bytes_read == values.nbytes


# ------------------------------------------------------------------------------------------------------ other homes


def verified_on_nvme(folder: Path, swap: Path) -> dict[str, Any]:
    """A partition of more than 1 MiB lies in a swap file; its buffer is compared before it is written there."""
    offload = {"device": "nvme", "nvme_path": str(swap), "buffer_size": 2**20, "buffer_count": 4}
    config = {**ds_config(offload_param=offload), "hf_zero_stream": {"verify": "full"}}
    model = hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(folder, ds_config=config)
    swapped = sum(param.ds_tensor.final_location is not None for param in model.parameters())
    return {"swapped": swapped, "digest": model.streaming_report.digest}


@pytest.mark.plugin("nvme")
@pytest.mark.slow
def test_swap_files(cluster: None, async_io: None, tmp_path: Path) -> None:
    folder = make_even_llama(tmp_path / "llama", vocab_size=9000)
    (on_disk,) = run_ranks(1, verified_on_nvme, folder, tmp_path)
    ((in_memory,),) = run_ranks(1, verified, folder, ["zero3"], "full")
    assert on_disk["swapped"] > 0
    ((exact,),) = run_ranks(1, verified_in_fp32, folder)
    assert on_disk["digest"] == exact != in_memory["digest"], "a cast gives other bits"


def verified_in_fp32(folder: Path) -> list[str]:
    return [load(folder, "zero3", "full", torch.float32).streaming_report.digest]


def verified_live(folder: Path) -> tuple[str, str, str]:
    """Loaded, and loaded into once more."""
    model = load(folder, "zero3", "full")
    with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(verify="full")):
        again = hf_zero_stream.load_into(model, str(folder))
    return model.streaming_report.digest, again.digest, again.ranks[0].verification.how


def test_load_into(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    for first, again, how in run_ranks(2, verified_live, zoo_checkpoint("qwen3_moe")):
        assert (first, how) == (again, "full")


def verified_through_a_relay(folder: Path) -> str:
    config = {**ds_config(), "hf_zero_stream": {"verify": "full", "read_from": "rank0"}}
    model = hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(folder, ds_config=config)
    return model.streaming_report.digest


@pytest.mark.plugin("relay")
def test_read_by_another_rank(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    digests = run_ranks(2, verified_through_a_relay, zoo_checkpoint("llama"))
    ((alone,),) = run_ranks(1, verified_in_fp32, zoo_checkpoint("llama"))
    assert digests == [alone, alone]


def verified_functions(folder: Path, kwargs: dict[str, Any], how: str) -> dict[str, Any]:
    config = {**ds_config(torch.bfloat16), "hf_zero_stream": {"verify": how}}
    model = hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(folder, ds_config=config, **kwargs)
    return {**asdict(model.streaming_report.ranks[0].verification), "digest": model.streaming_report.digest}


@pytest.mark.plugin("packed")
@pytest.mark.parametrize("make", [fp8, mxfp4], ids=["fp8", "mxfp4"])
def test_dequantised(cluster: None, tmp_path: Path, make: Callable[[Path], None]) -> None:
    """Functions are evaluated once more, from bytes that are read again."""
    config_class = {fp8: transformers.FineGrainedFP8Config, mxfp4: transformers.Mxfp4Config}[make]
    make(tmp_path)
    kwargs = {"quantization_config": config_class(dequantize=True)}
    digests = {
        result["digest"]
        for world_size in (1, 3)
        for result in run_ranks(world_size, verified_functions, tmp_path, kwargs, "full")
    }
    assert len(digests) == 1 and len(digests.pop()) == 16
    for result in run_ranks(2, verified_functions, tmp_path, kwargs, "sample"):
        assert result["parameters"] > 5 and result["elements"] > 0
