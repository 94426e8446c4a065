"""Libraries that change: an error that names what has changed, or the values of a plain load; never others.

- What a user meets when a library that we bend has changed: an error that names it, never other values.
- What becomes of a load if a release of transformers renames a function that we replace, or no longer calls it. Either
  an error that names it, or the values of a plain load; never others.
"""

from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from transformers import PreTrainedModel, core_model_loading
from transformers.distributed import DistributedConfig

import hf_zero_stream
from hf_zero_stream.bindings.install import Installation
from hf_zero_stream.bindings.table import TABLE
from hf_zero_stream.errors import VersionError
from hf_zero_stream.registry import PatchScope, Row, Severity
from hf_zero_stream.seams import sharding
from tests.support.cluster import run_ranks
from tests.support.fsdp2 import announce
from tests.support.mutations import MUTATIONS, mutation_of, renamed
from tests.support.parity import ds_config, whole_values
from tests.support.zoo import Checkpoint


def load(folder: Path, kind: Any = transformers.AutoModelForCausalLM, **kwargs: Any) -> Any:
    with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(progress=False)):
        return kind.from_pretrained(folder, **kwargs)


def in_zero3(folder: Path, kind: Any = transformers.AutoModelForCausalLM) -> list[bool]:
    """Whether each parameter is what a plain load gives."""
    import deepspeed

    expected = dict(kind.from_pretrained(folder, dtype=torch.float32).named_parameters())
    model = load(folder, kind, ds_config=ds_config(torch.float32))
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return [torch.equal(param, expected[name]) for name, param in model.named_parameters()]


# ------------------------------------------------------------------------------------------------- torch: FSDP2


def with_other_records(folder: Path) -> list[str]:
    """FSDP2's record of a parameter asks itself for more, or has other methods. ZeRO-3 has no part in it."""
    from hf_zero_stream.holdings import fsdp

    stock = FSDPParam.init_dtype_attrs

    def asks_for_more(self: Any, policy: Any) -> None:
        assert not self._has_sharded_grad_dtype_override  # as that of torch 2.15
        stock(self, policy)

    FSDPParam.init_dtype_attrs = asks_for_more  # type: ignore[method-assign]
    assert fsdp.no_byte_shards_reason() == ""
    fsdp.no_byte_shards_reason.cache_clear()
    FSDPParam.init_dtype_attrs = None  # type: ignore[method-assign, assignment]
    assert "not known how FSDP2" in fsdp.no_byte_shards_reason()
    del FSDPParam.init_dtype_attrs
    fsdp.param_class.cache_clear()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(VersionError) as caught:
        announce(cpu_ram_efficient_loading=True)
        try:
            load(folder)
        finally:
            patch.delenv("FSDP_VERSION")
    assert all(in_zero3(folder))
    return [str(caught.value)]


def test_fsdp2_never_takes_zero3_down(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    for (message,) in run_ranks(2, with_other_records, zoo_checkpoint("llama")):
        assert "torch 2" in message and "FSDPParam.init_dtype_attrs, which FSDP2 needs" in message


# ----------------------------------------------------------------------------------------- accelerate, transformers


def later(row: Row) -> Row:
    """As if transformers had given its function a new name."""
    return row._replace(of=row.of.replace(".is_custom_code", ".was_custom_code"))


def under_other_names(folder: Path) -> list[str]:
    """What accelerate prepares with, and what transformers' sharding asks, have other names."""
    messages = []
    announce(cpu_ram_efficient_loading=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(accelerate.accelerator, "fsdp2_prepare_model")
        with pytest.raises(VersionError) as caught:
            load(folder)
        messages.append(str(caught.value))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FSDP_VERSION")
        patch.setitem(TABLE, PatchScope.LOAD, [later(row) for row in TABLE[PatchScope.LOAD]])  # type: ignore[arg-type]
        with pytest.raises(VersionError) as caught:
            load(folder, distributed_config=transformers.distributed.DistributedConfig(fsdp_size=2))
        messages.append(str(caught.value))
        assert all(in_zero3(folder))
    return messages


def test_what_shards_has_another_name(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    for of_accelerate, of_transformers in run_ranks(2, under_other_names, zoo_checkpoint("llama")):
        assert "accelerate 1" in of_accelerate and "no accelerator.fsdp2_prepare_model" in of_accelerate
        assert "no modeling_utils.PreTrainedModel.was_custom_code, which distributed_config needs" in of_transformers


@pytest.mark.parametrize("sizes", [{"fsdp_size": 2}, {"dp_replicate_size": 2, "fsdp_size": 1}])
def test_an_older_transformers_shards_nothing_wrongly(
    zoo_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]
) -> None:
    """What it cuts before it converts has other values for some types. TP alone is left to it, as it always was."""
    monkeypatch.setattr(sharding, "_SINCE", "99")
    for config in (sizes, transformers.distributed.DistributedConfig(**sizes)):
        with pytest.raises(
            VersionError, match=r"_size.* is streamed with transformers 99 or newer.*without streaming"
        ):
            load(zoo_checkpoint("llama"), distributed_config=config)
    assert sharding.distributed_config_of({"distributed_config": {"tp_size": 2}}) is None
    assert sharding.distributed_config_of({"tp_plan": "auto"}) is None


def not_called(folder: Path) -> list[str]:
    """transformers initialises in another way; a model's class has a function of its own in place of ours."""
    messages = []
    with pytest.MonkeyPatch.context() as patch, pytest.raises(VersionError) as caught:
        patch.setattr(PreTrainedModel, "initialize_weights", lambda self, *args, **kwargs: None)
        load(folder, transformers.AutoModelForSequenceClassification, ds_config=ds_config(torch.float32))
    messages.append(str(caught.value))
    stock = vars(PreTrainedModel)["_load_pretrained_model"]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(VersionError) as caught:
        patch.setattr(transformers.LlamaForCausalLM, "_load_pretrained_model", stock, raising=False)
        load(folder, ds_config=ds_config(torch.float32))
    messages.append(str(caught.value))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(VersionError) as caught:
        patch.setattr(PreTrainedModel, "_finalize_model_loading", staticmethod(lambda model, config, info: info))
        load(folder, ds_config=ds_config(torch.float32))
    messages.append(str(caught.value))
    return messages


def test_what_values_depend_on_is_not_called(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """A head that the checkpoint lacks would have what was in its memory before."""
    for of_head, of_all, of_values in run_ranks(2, not_called, zoo_checkpoint("llama")):
        assert "without calling modeling_utils.PreTrainedModel._move_missing_keys_from_meta_to_device" in of_values
        assert "without calling modeling_utils.PreTrainedModel._initialize_weights" in of_head
        assert "without calling modeling_utils.PreTrainedModel._load_pretrained_model" in of_all


# -------------------------------------------------------------------------------------------------- all libraries


def test_an_absent_attribute_is_named_and_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    places = ("transformers.core_model_loading:dot_natural_key", "accelerate.accelerator:Accelerator.no_such_method")
    rows = [Row(place, "builtins:print", severity=Severity.ESSENTIAL) for place in places]
    monkeypatch.setitem(TABLE, PatchScope.SAVE, rows)  # type: ignore[arg-type]
    before = core_model_loading.dot_natural_key
    match = r"accelerate .* has no accelerator.Accelerator.no_such_method"
    with pytest.raises(VersionError, match=match), Installation(PatchScope.SAVE, TABLE):
        pass
    assert core_model_loading.dot_natural_key is before


HEAD = "score.weight"


def values(folder: Path, **kwargs: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    kind = transformers.AutoModelForSequenceClassification
    return whole_values(kind.from_pretrained(folder, dtype=torch.float32, **kwargs))


def outcome(folder: Path, plain: dict[str, torch.Tensor]) -> str:
    try:
        with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(progress=False)):
            found = values(folder, ds_config=ds_config(torch.float32))
    except VersionError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    wrong = [name for name in plain if name != HEAD and not torch.equal(found[name], plain[name])]
    if not 0.5 < found[HEAD].std() / plain[HEAD].std() < 2 or found[HEAD].shape != plain[HEAD].shape:
        wrong.append(HEAD)  # the checkpoint lacks it
    return f"wrong: {wrong}" if wrong else "right"


def mutated(folder: Path) -> dict[tuple[str, str], str]:
    plain, found = values(folder), {}
    for row in TABLE[PatchScope.LOAD]:
        for mutate in MUTATIONS if row.leads_to else (renamed,):
            with mutation_of(row, PatchScope.LOAD, mutate):
                found[mutate.__name__, row.of] = outcome(folder, plain)
    return found


def test_never_other_values(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """Under ZeRO-3, of a checkpoint that lacks a head."""
    (found,) = run_ranks(1, mutated, zoo_checkpoint("llama"), timeout=400)
    essential = {row.of for rows in TABLE.values() for row in rows if row.severity is Severity.ESSENTIAL}
    for (mutation, name), what in found.items():
        if mutation == "renamed" and name in essential:
            assert f"has no {name.partition('.')[2].replace(':', '.')}_" in what
        elif what != "right":
            assert "without calling" in what and mutation == "uncalled", (name, what)
    told = [name for (mutation, name), what in found.items() if mutation == "uncalled" and what != "right"]
    assert told == ["transformers.modeling_utils:PreTrainedModel._load_pretrained_model"]


def mutated_when_sharded(folder: Path) -> dict[tuple[str, str], str]:
    load, found = partial(transformers.AutoModelForCausalLM.from_pretrained, folder, dtype=torch.float32), {}
    plain = dict(load().named_parameters())
    for row in filter(attrgetter("leads_to"), TABLE[PatchScope.LOAD]):
        for mutate in MUTATIONS:
            with mutation_of(row, PatchScope.LOAD, mutate):
                try:
                    with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(progress=False)):
                        model = load(distributed_config=DistributedConfig(fsdp_size=2))
                    wrong = [
                        key for key, it in model.named_parameters() if not torch.equal(it.full_tensor(), plain[key])
                    ]
                    found[mutate.__name__, row.name] = f"wrong: {wrong}" if wrong else "right"
                except VersionError as error:
                    found[mutate.__name__, row.name] = str(error)
    return found


def test_never_other_shards(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """Of a type whose conversions would be wrong on what was cut."""
    for found in run_ranks(2, mutated_when_sharded, zoo_checkpoint("qwen3_moe"), timeout=400):
        assert "without calling" in found["uncalled", "modeling_utils.PreTrainedModel._load_pretrained_model"]
        assert all(what == "right" or "has no" in what or "without calling" in what for what in found.values()), found
