"""What becomes of a load if a release of transformers renames a function that we replace, or no longer calls it.

Either an error that names it, or the values of a plain load; never others.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.distributed import DistributedConfig

import hf_zero_stream
from hf_zero_stream.bindings.table import TABLE
from hf_zero_stream.errors import VersionError
from hf_zero_stream.registry import PatchScope, Weight
from tests.support.cluster import run_ranks
from tests.support.mutations import MUTATIONS, mutation_of, renamed
from tests.support.parity import ds_config
from tests.support.whole import whole_values
from tests.support.zoo import Checkpoint


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
    for scope in (PatchScope.LOAD, PatchScope.HIDING):
        for row in TABLE[scope]:
            for mutate in MUTATIONS if row.leads_to else (renamed,):
                with mutation_of(row, scope, mutate):
                    found[mutate.__name__, row.of] = outcome(folder, plain)
    return found


def test_never_other_values(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """Under ZeRO-3, of a checkpoint that lacks a head."""
    (found,) = run_ranks(1, mutated, zoo_checkpoint("llama"), timeout=400)
    essential = {row.of for rows in TABLE.values() for row in rows if row.weight is Weight.ESSENTIAL}
    for (mutation, name), what in found.items():
        if mutation == "renamed" and name in essential:
            assert f"has no {name.partition('.')[2].replace(':', '.')}_" in what
        elif what != "right":
            assert "without calling" in what and mutation == "uncalled", (name, what)
    told = [name for (mutation, name), what in found.items() if mutation == "uncalled" and what != "right"]
    assert len(told) == 4, told


def mutated_when_sharded(folder: Path) -> dict[tuple[str, str], str]:
    load, found = partial(transformers.AutoModelForCausalLM.from_pretrained, folder, dtype=torch.float32), {}
    plain = dict(load().named_parameters())
    for row in TABLE[PatchScope.SHARDED]:
        for mutate in MUTATIONS:
            with mutation_of(row, PatchScope.SHARDED, mutate):
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
        of_name = {
            mutation: found.pop((mutation, "core_model_loading.is_dtensor")) for mutation in ("renamed", "uncalled")
        }
        assert "has no core_model_loading.is_dtensor_, which distributed_config needs" in of_name["renamed"]
        assert "without calling core_model_loading.is_dtensor" in of_name["uncalled"]
        assert all(what == "right" or "has no" in what for what in found.values()), found
