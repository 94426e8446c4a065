"""Ranks that another one reads for get values through it while they plan, too, and need to see small files only."""

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers import conversion_mapping
from transformers.core_model_loading import WeightConverter

import hf_zero_stream
from hf_zero_stream import StreamingConfig
from hf_zero_stream.plugins.relay import relay
from hf_zero_stream.plugins.relay.relay import RelayServer
from tests import sampling
from tests.loading.test_odd_parameters import Normalises, ThroughNumpy
from tests.support import odd_models
from tests.support.checkpoint_files import rewritten
from tests.support.cluster import SOON_S, run_ranks, run_ranks_expecting_errors
from tests.support.disk import failing, replace_reads
from tests.support.messages import outcome_of
from tests.support.parity import differences, ds_config, unequal
from tests.support.quantised_checkpoints import compressed_tensors, fp8, mxfp4
from tests.support.zoo import Checkpoint


def own_view(folder: Path, reader: int = 0, hide: tuple[str, ...] = ("*.safetensors",)) -> Path:
    """The folder as this rank sees it: only the rank `reader` has all of it."""
    rank = dist.get_rank()
    if rank == reader:
        return folder
    return shutil.copytree(
        folder, folder.parent / f"rank{rank}" / folder.name, ignore=shutil.ignore_patterns(*hide), dirs_exist_ok=True
    )


def by_its_name(folder: Path) -> str:
    """Outside ZeRO-3, ranks share a load of which all give the same path."""
    os.chdir(folder.parent)
    return folder.name


@contextmanager
def relayed(read_from: str = "rank0", **settings: Any) -> Iterator[None]:
    config = StreamingConfig(read_from=read_from, **settings)
    with hf_zero_stream.streaming(config), patch.object(relay, "CHUNK_BYTES", 1000):
        yield


# -------------------------------------------------------------------------------------------- values while planning


def converted_by(op: Any) -> None:
    conversion_mapping.register_checkpoint_conversion_mapping(
        "Odd", [WeightConverter("first.weight", "first.weight", [op()])], overwrite=True
    )


def load_what_needs_values(folders: dict[str, Path]) -> dict[str, list[str]]:
    """What differs from a plain load of the whole folder, or the error, case by case."""
    packed, causal = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}, "causal"
    cases: list[tuple[str, Any, dict[str, Any], torch.dtype]] = [
        ("extra state", odd_models.ExtraState, {}, torch.float32),
        ("an op that looks at values", odd_models.Odd, {}, torch.float32),
        ("an op in numpy", odd_models.Odd, {}, torch.float32),
        ("packed integers", causal, packed, torch.bfloat16),
        ("fp8", causal, {"quantization_config": transformers.FineGrainedFP8Config(dequantize=True)}, torch.bfloat16),
        ("mxfp4", causal, {"quantization_config": transformers.Mxfp4Config(dequantize=True)}, torch.bfloat16),
        ("one file, no dtype", causal, {"dtype": "auto"}, torch.float32),
        ("shards, no dtype", causal, {"dtype": "auto"}, torch.float32),
    ]
    plain: dict[str, Any] = {}

    def load(name: str, model_class: Any, folder: Path, **kwargs: Any) -> Any:
        if name.startswith("an op"):
            converted_by(Normalises if "values" in name else ThroughNumpy)
        model_class = transformers.AutoModelForCausalLM if model_class is causal else model_class
        return model_class.from_pretrained(folder, **kwargs)

    cases = [case for case in cases if case[0] in folders]
    for name, model_class, kwargs, dtype in cases:
        dtype_kwargs = {} if "dtype" in kwargs else {"dtype": dtype}
        plain[name] = load(name, model_class, folders[name], **kwargs, **dtype_kwargs)
    found: dict[str, list[str]] = {}
    for verify in ("sizes", "full"):
        for name, model_class, kwargs, dtype in cases:
            with relayed(verify=verify):
                model = load(name, model_class, own_view(folders[name]), **kwargs, ds_config=ds_config(dtype))
            found[f"{name}, {verify}"] = differences(model, plain[name], dtype)
            if name == "extra state" and not torch.equal(model.extra.memory, plain[name].extra.memory):
                found[f"{name}, {verify}"].append("extra state")
            del model
    return found


@pytest.mark.plugin("verify")
def test_values_that_planning_needs(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folders = {}
    for name, model_class in (("extra state", odd_models.ExtraState), ("an op that looks at values", odd_models.Odd)):
        folders[name] = tmp_path / name
        odd_models.fill(model_class(odd_models.OddConfig())).save_pretrained(folders[name], max_shard_size=300)
    folders["an op in numpy"] = folders["an op that looks at values"]
    for name in ("one file, no dtype", "shards, no dtype"):
        folders[name] = shutil.copytree(zoo_checkpoint("llama"), tmp_path / name)
        config = json.loads((folders[name] / "config.json").read_text())
        (folders[name] / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "dtype"}))
    rewritten(folders["one file, no dtype"], folders["one file, no dtype"])
    assert_planned(folders)


@pytest.mark.plugin("verify", "packed")
def test_values_that_planning_of_quantised_ones_needs(cluster: None, tmp_path: Path) -> None:
    makers: dict[str, Callable[[Path], Any]] = {
        "packed integers": lambda folder: compressed_tensors(folder, "int4 by channel"),
        "fp8": fp8,
        "mxfp4": mxfp4,
    }
    for name, make in makers.items():
        (tmp_path / name).mkdir()
        make(tmp_path / name)
    assert_planned({name: tmp_path / name for name in makers})


def assert_planned(folders: dict[str, Path]) -> None:
    folders = dict(sampling.every(2, folders.items()))
    for found in run_ranks(2, load_what_needs_values, folders):
        assert len(found) == 2 * len(folders) and not any(found.values()), {
            name: what for name, what in found.items() if what
        }


# ------------------------------------------------------------------------------------------------ every kind of load


def load_in_other_ways(folder: Path) -> dict[str, Any]:
    """Four ranks on two hosts; outside ZeRO-3, into a model, with a reader on each host."""
    rank = dist.get_rank()
    plain = transformers.LlamaForCausalLM.from_pretrained(folder)
    found: dict[str, Any] = {}
    with relayed():
        model = transformers.LlamaForCausalLM.from_pretrained(by_its_name(own_view(folder)))
    found["shared"] = unequal(model, plain)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    with hf_zero_stream.streaming(StreamingConfig(read_from="rank0")):
        hf_zero_stream.load_into(model, str(own_view(folder)))
    found["into"] = unequal(model, plain)
    os.environ |= {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}
    seen = by_its_name(own_view(folder, reader=rank - rank % 2))
    with relayed("local_rank0"):
        found["on each host, shared"] = unequal(transformers.LlamaForCausalLM.from_pretrained(seen), plain)
        model = transformers.LlamaForCausalLM.from_pretrained(seen, ds_config=ds_config())
    found["on each host"] = unequal(model, plain)
    return found


@pytest.mark.slow
def test_other_ways_to_load(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = shutil.copytree(zoo_checkpoint("llama"), tmp_path / "llama")
    for found in run_ranks(4, load_in_other_ways, folder):
        assert not any(found.values()), found


# ------------------------------------------------------------------------------------------- what must still be seen


def errors_where_files_are_missing(sharded: Path, pickled: Path) -> dict[str, str]:
    plain = transformers.AutoModelForMaskedLM.from_pretrained(pickled)
    found: dict[str, str] = {}
    index = ("*.safetensors", "*.index.json")
    cases: list[tuple[str, Any, Path, tuple[str, ...]]] = [
        ("no index", transformers.AutoModelForCausalLM, sharded, index),
        ("no pickle", transformers.AutoModelForMaskedLM, pickled, ("*.bin",)),
        ("a pickle", transformers.AutoModelForMaskedLM, pickled, ("*.safetensors",)),
    ]
    for name, model_class, folder, hide in cases:
        seen = own_view(folder, hide=hide)
        dist.barrier()
        with relayed():
            model = outcome_of(partial(model_class.from_pretrained, seen, ds_config=ds_config()))
        found[name] = model if isinstance(model, str) else str(unequal(model, plain))
        del model
        if seen != folder:
            shutil.rmtree(seen)
    return found


@pytest.mark.plugin("pickled")
def test_what_every_rank_must_see(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The index, and files that are not safetensors: else all ranks say which rank lacks them, at once."""
    sharded = shutil.copytree(zoo_checkpoint("llama"), tmp_path / "llama")
    pickled = tmp_path / "bert"
    bert = transformers.AutoModelForMaskedLM.from_pretrained(zoo_checkpoint("bert"))
    bert.config.save_pretrained(pickled)
    torch.save(bert.state_dict(), pickled / "pytorch_model.bin")
    for found in run_ranks(2, errors_where_files_are_missing, sharded, pickled):
        for name in ("no index", "no pickle"):
            assert found[name].startswith("ReadError") and "rank 1" in found[name], found
            assert "every rank must still see" in found[name]
        assert found["a pickle"] == "[]"


# ------------------------------------------------------------------------------------------------- failing readers


def load_extra_state(folder: Path, how: str) -> None:
    if how == "dies early":

        def lost(**kwargs: Any) -> None:
            if dist.get_rank() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer")  # as gloo says it

        dist.new_group = lost
    elif dist.get_rank() == 0 and how == "fails":
        replace_reads(failing(errno.EIO))
    elif dist.get_rank() == 0:
        RelayServer._answer = lambda *args: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    with relayed():
        odd_models.ExtraState.from_pretrained(own_view(folder), ds_config=ds_config())


@pytest.mark.parametrize("how", ["fails", "dies", "dies early"])
def test_a_reader_that_fails_while_others_plan(cluster: None, tmp_path: Path, how: str) -> None:
    odd_models.fill(odd_models.ExtraState(odd_models.OddConfig())).save_pretrained(tmp_path / "model")
    outcomes = run_ranks_expecting_errors(3, load_extra_state, tmp_path / "model", how, timeout=90)
    assert outcomes[0].error_type == ("ReadError" if how == "fails" else "Died")
    for outcome in outcomes[1:]:
        assert outcome.error_type == ("ReadError" if how == "fails" else "PeerError"), outcome
        assert "rank 0" in str(outcome.error_message) and outcome.seconds < SOON_S
