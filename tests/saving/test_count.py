"""What ranks hold goes into the files, all of it: a plan with less is an error before anything has its name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import hf_zero_stream
from hf_zero_stream.checkpoint.lazy import LazyTensor
from hf_zero_stream.checkpoint.nodes import Stored, View
from hf_zero_stream.checkpoint.safetensors import NotedShard, lay_out_shard
from hf_zero_stream.errors import SaveError
from hf_zero_stream.saving.count import nothing, refuse_too_few
from hf_zero_stream.saving.plan import Share, Sources, make_save_plan
from hf_zero_stream.saving.preparation import SaveItem
from hf_zero_stream.saving.save import Save
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.parity import ds_config


def tiny(**more: Any) -> transformers.PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**{**sizes, "vocab_size": 40, "num_key_value_heads": 2, **more})
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def halved(of_equal_values: bool) -> transformers.PreTrainedModel:
    model = tiny()
    half = model.lm_head.weight.detach().chunk(2)[0 if of_equal_values else dist.get_rank()]
    model.lm_head.weight = nn.Parameter(half.clone())
    return model


def save_halves(folder: Path, of_equal_values: bool) -> None:
    """Each rank has half of the head, as tensor parallelism by hand leaves it."""
    model = halved(of_equal_values)
    hf_zero_stream.save_pretrained(model, folder)


def save_new_head(folder: Path) -> None:
    """A head that each rank has drawn by itself, in the shape of the config or a larger one: rank 0's is saved."""
    model = tiny()
    torch.manual_seed(dist.get_rank())
    model.lm_head = nn.Linear(16, 48, bias=False)
    hf_zero_stream.save_pretrained(model, folder)


def assert_refused(call: Callable[..., Any], *args: Any) -> None:
    outcomes = run_ranks_expecting_errors(2, call, *args)
    assert [outcome.error_type for outcome in outcomes] == ["SaveError"] * 2
    assert all("lm_head.weight: (20, 16) of (40, 16)" in str(outcome.error_message) for outcome in outcomes)


def test_halves(cluster: None, tmp_path: Path) -> None:
    """Halves were saved as the whole, with a warning that said that each rank held it in full."""
    assert_refused(save_halves, tmp_path, False)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def stream_halves(of_equal_values: bool) -> int:
    return len(hf_zero_stream.weight_stream(halved(of_equal_values), to="all").metadata)


@pytest.mark.plugin("stream")
def test_streamed_halves(cluster: None) -> None:
    """A stream gave rank 0's half, and compared nothing."""
    assert_refused(stream_halves, False)
    assert all(run_ranks(2, stream_halves, True))


def partition_halves(folder: Path) -> None:
    """Each rank has half of the head, and ZeRO-3 has all of that on this rank alone."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    model = halved(False)
    deepspeed.zero.Init(module=model, data_parallel_group=alone, config_dict_or_path=ds_config(torch.float32))
    hf_zero_stream.save_pretrained(model, folder)


def test_partitions_of_halves(cluster: None, tmp_path: Path) -> None:
    """Nothing compared the partitions of ZeRO-3, of which a file had those of one half."""
    assert_refused(partition_halves, tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def save_loaded(checkpoint: Path, folder: Path, change: str) -> None:
    """The config does not say what the checkpoint has: the class cannot be asked."""
    with hf_zero_stream.streaming():
        model = Unlike.from_pretrained(checkpoint)
    if change == "halves":
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().chunk(2)[dist.get_rank()].clone())
    hf_zero_stream.save_pretrained(model, folder)


class Unlike(transformers.LlamaForCausalLM):
    """Asks for more than its config, once it has been loaded."""

    made = 0

    def __init__(self, config: Any) -> None:
        Unlike.made += 1
        if Unlike.made > 1:
            raise TypeError("made by a factory")
        super().__init__(config)


def test_compared_with_what_was_loaded(cluster: None, tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "checkpoint")
    assert_refused(save_loaded, tmp_path / "checkpoint", tmp_path / "halves", "halves")
    run_ranks(2, save_loaded, tmp_path / "checkpoint", tmp_path / "unchanged", "")


def save_resized(folder: Path) -> None:
    """Fewer rows, which the config says too: the user's choice, also where ranks have drawn other values."""
    model = tiny()
    model.resize_token_embeddings(30)
    with torch.no_grad():
        model.lm_head.weight.add_(dist.get_rank())
    hf_zero_stream.save_pretrained(model, folder)


def test_resized(cluster: None, tmp_path: Path) -> None:
    run_ranks(2, save_resized, tmp_path)
    assert (tmp_path / "model.safetensors").exists()


def test_what_a_user_made_smaller(cluster: None, tmp_path: Path) -> None:
    """Of equal values on all ranks, or with ranks' own ones in another shape than smaller, it is the user's choice."""
    run_ranks(2, save_halves, tmp_path / "cut", True)
    run_ranks(2, save_new_head, tmp_path / "new")
    assert all((tmp_path / name / "model.safetensors").exists() for name in ("cut", "new"))


def test_a_layout_that_leaves_out(tmp_path: Path) -> None:
    """Whatever lays out the files: what it was offered and does not give is named."""
    model = tiny()

    def lay_out(folder: Path, parameters: Any) -> list[NotedShard]:
        entries = parameters.own_entries()
        del entries["lm_head.weight"]
        return [NotedShard("model.safetensors", entries, {"format": "pt"})]

    with pytest.raises(SaveError, match=r"of 1 fewer do: lm_head\.weight: 0 of 640"):
        Save(model, tmp_path).run(SaveItem(lay_out=lay_out, index_name="index.json"))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    report = Save(model, tmp_path).run(
        SaveItem(lay_out=lay_out, index_name="index.json", left_out="lm_head.weight".__eq__)
    )
    assert report.files == ("model.safetensors",)


def test_what_transformers_ignores(tmp_path: Path) -> None:
    model = tiny()
    model._keys_to_ignore_on_save = {"model.norm.weight"}
    hf_zero_stream.save_pretrained(model, tmp_path)
    assert (tmp_path / "model.safetensors").exists()


def test_a_part_of_a_parameter() -> None:
    """A parameter that ranks hold between them, of which a file would have some rows."""
    shares = (Share(0, 0, 6), Share(1, 6, 12))
    sources = Sources(shares={"a": shares, "b": shares})
    whole = {name: View.whole(Stored((4, 3), torch.float32, name)) for name in "ab"}

    def elements(tensors: dict[str, View]) -> Any:
        lazy = {name: LazyTensor.of(view, lambda view: torch.zeros(view.sizes)) for name, view in tensors.items()}
        shard = lay_out_shard(NotedShard("model.safetensors", lazy, {}))
        return make_save_plan([shard], sources, rank=1, world_size=2, single_writer=False)

    plan = elements(whole)
    assert plan.elements == {"a": 12, "b": 12}
    refuse_too_few(plan, sources, "ab", nothing, {})
    with pytest.raises(SaveError, match="b: 9 of 12"):
        refuse_too_few(elements({**whole, "b": whole["b"].narrow(0, 0, 3)}), sources, "ab", "b".__eq__, {})
