"""ZeRO-3: small parameters, which are in full between two steps, changed there by code that gathers nothing."""

from pathlib import Path
from typing import Any

import deepspeed
import peft
import pytest
import torch
import transformers

import hf_zero_stream
from hf_zero_stream.errors import UnsupportedError
from tests.support.checkpoint_files import tensors_of
from tests.support.cluster import run_ranks
from tests.support.messages import listen
from tests.support.training_state import all_in_one_group, engine_of, state_config, train
from tests.support.whole import whole_values
from tests.support.zoo import Checkpoint


NORM = "model.norm.weight"


def in_place(folder: Path, target: Path, config: dict[str, Any]) -> list[str]:
    """Change a norm on all ranks, save in all ways, and train on; the warnings."""
    said = listen()
    engine = engine_of(folder, config, all_in_one_group)
    train(engine, range(2))
    norm = engine.module.get_parameter(NORM)
    norm.data[0] = 7  # an element of the first rank's partition
    hf_zero_stream.save_pretrained(engine, target / "weights")
    hf_zero_stream.save_state(engine, target / "state")
    assert norm.data[0] == 7 and norm.data.numel() > 1
    if norm.dtype == torch.bfloat16:
        with pytest.raises(UnsupportedError, match=f"code has changed {NORM} in place"):
            hf_zero_stream.save_pretrained(engine, target / "fp32", dtype=torch.float32)
    train(engine, (2,))
    assert norm.data[0] != 7
    hf_zero_stream.save_pretrained(engine, target / "after")
    return said


def one_rank_only(folder: Path, target: Path, config: dict[str, Any]) -> None:
    engine = engine_of(folder, config, all_in_one_group)
    train(engine, range(1))
    if torch.distributed.get_rank() == 0:
        engine.module.get_parameter(NORM).data.fill_(7)
    hf_zero_stream.save_pretrained(engine, target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_what_memory_shows_is_saved(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, dtype: torch.dtype
) -> None:
    folder = zoo_checkpoint("llama", dtype)
    config = state_config(3, dtype, stage3_param_persistence_threshold=100)
    first, second = run_ranks(2, in_place, folder, tmp_path, config)
    assert first and all(text.startswith(f"{NORM}: code has changed") for text in first)
    assert not second  # its part has not changed
    for name in ("weights", "state"):
        assert tensors_of(tmp_path / name, "model*.safetensors")[NORM][0] == 7
    before, after = (tensors_of(tmp_path / name)[NORM] for name in ("weights", "after"))
    assert after[0] != 7 and torch.allclose(before[1:], after[1:], atol=0.02)
    run_ranks(2, one_rank_only, folder, tmp_path / "rank 0", config)
    assert tensors_of(tmp_path / "rank 0")[NORM].eq(7).all()


def merge(folder: Path, target: Path, config: dict[str, Any], how: str) -> dict[str, torch.Tensor] | None:
    """Train an adapter, merge it with nothing gathered, and save; what memory shows, on rank 0."""
    with hf_zero_stream.streaming():
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, ds_config=config)
        torch.manual_seed(0)
        lora = peft.LoraConfig(r=3, target_modules=["q_proj", "embed_tokens"], init_lora_weights=False)
        model = peft.get_peft_model(model, lora)
        trained = [param for param in model.parameters() if param.requires_grad]
        engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=trained)
        train(engine, range(2))
        hf_zero_stream.save_state(engine, target / "adapter")
        if how == "unload":
            model = model.merge_and_unload()
        else:
            model.merge_adapter()
            model.unmerge_adapter()
            model.merge_adapter(safe_merge=True)
            model = model.get_base_model()
        shown = whole_values(model)
        if how == "unload":
            model.save_pretrained(target / "merged")
    return shown if torch.distributed.get_rank() == 0 else None


@pytest.mark.parametrize(
    ("how", "threshold"),
    [
        ("unload", 1000),
        pytest.param("unload", 100_000, marks=pytest.mark.slow),
        pytest.param("adapter", 1000, marks=pytest.mark.slow),
    ],
)
def test_merged_adapters(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, how: str, threshold: int) -> None:
    folder = zoo_checkpoint("llama")
    config = state_config(3, torch.float32, stage3_param_persistence_threshold=threshold)
    shown = run_ranks(2, merge, folder, tmp_path, config, how)[0]
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain: Any = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).merge_and_unload()
    expected = plain.state_dict()
    for name, value in expected.items():
        key = name if how == "unload" else next(each for each in shown if each.replace(".base_layer", "") == name)
        assert torch.allclose(shown[key], value, atol=1e-6), name
        if how == "unload":
            assert torch.equal(tensors_of(tmp_path / "merged")[name], shown[name]), name
