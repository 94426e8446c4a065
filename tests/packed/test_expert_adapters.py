"""LoRA on experts that stay packed: in fp32 the losses of PEFT's own way on the dequantised model, and its files."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers

import hf_zero_stream
from hf_zero_stream.errors import UnsupportedError
from tests.support.cluster import run_ranks
from tests.support.packed_training import (
    adapter_engine,
    dequantised,
    fill_adapters,
    inputs,
    load,
    losses_of_whole,
    three_losses,
)
from tests.support.parity import ds_config
from tests.support.quantised_checkpoints import compressed_tensors, fp8, mxfp4


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

FORMATS: dict[str, Callable[[Path], None]] = {
    "fp8": fp8,
    "mxfp4": mxfp4,  # transposed, with biases
    "int4": lambda folder: compressed_tensors(folder, "int4 by group"),
}


@pytest.fixture(scope="module", params=FORMATS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    FORMATS[request.param](found := tmp_path_factory.mktemp(request.param))
    return found


def adapted(base: Any, **settings: Any) -> Any:
    config = {"r": 3, "lora_alpha": 5, "target_modules": ["o_proj"], "target_parameters": EXPERTS, **settings}
    model = peft.get_peft_model(base, peft.LoraConfig(**config))
    fill_adapters(model)
    return model


def plain(folder: Path) -> Any:
    """The base model, dequantised, whole, in fp32, without DeepSpeed."""
    folder, how = dequantised(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how).float()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    model.eval()  # that of an engine returns nothing
    found: torch.Tensor = model(input_ids=inputs()["input_ids"]).logits.clone()
    return found


def trained(folder: Path, saved: Path) -> dict[str, Any]:
    """With adapters on packed experts: losses; the adapters are saved, and put on again."""
    config = ds_config(torch.float32)
    found: dict[str, Any] = {}
    for checkpointed in (False, True):
        base = load(folder, config, dtype=torch.float32)
        if checkpointed:
            base.gradient_checkpointing_enable()
            base.enable_input_require_grads()
            base.train()
        engine = adapter_engine(adapted(base), config)
        found[f"{checkpointed=}"] = three_losses(engine)
    found["logits"] = logits(engine)
    with engine.module.disable_adapter():
        found["bare"] = logits(engine)
    with hf_zero_stream.streaming():
        engine.module.save_pretrained(saved)
    dist.barrier()
    again = peft.PeftModel.from_pretrained(load(folder, config, dtype=torch.float32), saved, is_trainable=True)
    found["again"] = logits(adapter_engine(again, config))
    with pytest.raises(UnsupportedError, match="adapters cannot be merged into them"):
        again.merge_adapter()
    return found


def test_trained(cluster: None, folder: Path, tmp_path: Path) -> None:
    """PEFT's way adds up matrices, and this one products: in fp32 that is a difference of the last digits."""
    expected = losses_of_whole(adapted(plain(folder)))
    of_ranks = run_ranks(2, trained, folder, tmp_path, timeout=300)
    for found in of_ranks:
        for title in ("checkpointed=False", "checkpointed=True"):
            assert found[title] == pytest.approx(expected, abs=3e-6), title
        assert torch.equal(found["logits"], found["again"])
    assert of_ranks[0]["checkpointed=True"] == of_ranks[1]["checkpointed=True"]

    base = plain(folder)
    close = partial(torch.testing.assert_close, atol=1e-4, rtol=1e-4)
    close(of_ranks[0]["bare"], logits(base))
    elsewhere = logits(peft.PeftModel.from_pretrained(base, tmp_path))
    close(of_ranks[0]["logits"], elsewhere)
    assert (elsewhere - of_ranks[0]["bare"]).abs().max() > 0.1, "the adapters do something"


ACTIVE = (["default"], ["second"], ["default", "second"])


def with_several(folder: Path, of_peft: Path) -> list[torch.Tensor]:
    """Logits with adapters that PEFT has saved elsewhere, alone and two at a time."""
    config = ds_config(torch.float32)
    model = peft.PeftModel.from_pretrained(
        load(folder, config, dtype=torch.float32), of_peft / "default", is_trainable=True
    )
    model.load_adapter(of_peft / "second", "second")
    return logits_of_several(adapter_engine(model, config), model)


def logits_of_several(engine: Any, model: Any) -> list[torch.Tensor]:
    found = []
    for names in ACTIVE:
        model.base_model.set_adapter(names)
        found.append(logits(engine))
    return found


def test_several_of_peft(cluster: None, folder: Path, tmp_path: Path) -> None:
    for rank_of_adapter, name in ((3, "default"), (2, "second")):
        torch.manual_seed(rank_of_adapter)
        adapted(plain(folder), r=rank_of_adapter).save_pretrained(tmp_path / name)
    model = peft.PeftModel.from_pretrained(plain(folder), tmp_path / "default")
    model.load_adapter(tmp_path / "second", "second")
    expected = logits_of_several(model, model)
    assert len({round(each.sum().item(), 2) for each in expected}) == len(ACTIVE), "each does something"
    for found in run_ranks(2, with_several, folder, tmp_path, timeout=300):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
