"""Adapters of PEFT beside packed weights: other kinds than LoRA, several at a time, and what else one does to a model.

Each is compared with the same done to the dequantised model.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import peft
import pytest
import torch
import torch.distributed as dist

from tests.support.cluster import run_ranks
from tests.support.packed_training import fill_adapters, inputs, load, three_losses
from tests.support.parity import ds_config
from tests.support.quantised_checkpoints import compressed_tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model in int4."""
    compressed_tensors(found := tmp_path_factory.mktemp("int4"), "int4 with zero points")
    return found


TARGETS = ["q_proj", "o_proj"]

KINDS: dict[str, Callable[[], Any]] = {
    "AdaLoRA": lambda: peft.AdaLoraConfig(
        init_r=4, target_r=2, total_step=10, tinit=1, tfinal=2, target_modules=TARGETS
    ),
    "VeRA": lambda: peft.VeraConfig(r=4, target_modules=["q_proj"]),
    "IA3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
}


def adapted(base: Any, config: Any) -> Any:
    """A model with such adapters, with random values."""
    model = peft.get_peft_model(base, config)
    for name, param in model.named_parameters():
        if "ranknum" in name:  # PEFT trains AdaLoRA's where it has cast it, which it does in plain layers alone
            param.requires_grad_(False)
    torch.manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.normal_(std=0.1)
    return model


def losses_of_kinds(folder: Path, names: list[str]) -> dict[str, list[list[float]]]:
    found: dict[str, list[list[float]]] = {}
    config = ds_config(torch.bfloat16)
    for name in names:
        for keep in (True, False):
            torch.manual_seed(0)
            model = adapted(load(folder, config, keep), KINDS[name]())
            trainable = [param for param in model.parameters() if param.requires_grad]
            engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=trainable)
            found.setdefault(name, []).append(three_losses(engine))
    return found


@pytest.mark.slow
def test_kinds_of_adapters(cluster: None, folder: Path) -> None:
    for of_rank in run_ranks(2, losses_of_kinds, folder, list(KINDS), timeout=120):
        for name, (packed, dequantised) in of_rank.items():
            assert packed == dequantised and packed[0] != packed[2], name


def with_lora(folder: Path, keep_quantized: bool, change: Callable[[Any], Any] = lambda base: base) -> Any:
    """An engine with LoRA; `change` is made to the base model before."""
    config = ds_config(torch.bfloat16)
    base = load(folder, config, keep_quantized)
    change(base)
    model = adapted(base, peft.LoraConfig(r=3, target_modules=TARGETS))
    trainable = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=trainable)
    return engine


def generated(folder: Path, keep_quantized: bool) -> Any:
    """Ranks have prompts of their own, and stop at times of their own: the others go on gathering."""
    engine, rank = with_lora(folder, keep_quantized), dist.get_rank()
    tokens = inputs(seed=rank)["input_ids"][:, : 4 + rank]
    made = engine.module.generate(input_ids=tokens, max_new_tokens=4 + 3 * rank, do_sample=False, synced_gpus=True)
    return made.tolist()


def with_checkpointing(folder: Path, keep_quantized: bool) -> Any:
    def change(base: Any, use_reentrant: bool) -> None:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        base.enable_input_require_grads()
        base.train()

    return [
        three_losses(with_lora(folder, keep_quantized, lambda base, each=each: change(base, each)))
        for each in (True, False)
    ]


def evaluated_between(folder: Path, keep_quantized: bool) -> Any:
    engine = with_lora(folder, keep_quantized)
    found = three_losses(engine)
    engine.eval()
    for without_gradients in (torch.no_grad, torch.inference_mode):
        with without_gradients():
            found.append(engine(**inputs()).loss.item())
    engine.train()
    return found + three_losses(engine)


def with_several(folder: Path, keep_quantized: bool) -> Any:
    config = ds_config(torch.bfloat16)
    model = peft.get_peft_model(load(folder, config, keep_quantized), peft.LoraConfig(r=3, target_modules=TARGETS))
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["v_proj", "q_proj"]))
    model.base_model.set_adapter(["default", "second"])
    fill_adapters(model)
    trainable = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=trainable)
    found = three_losses(engine)
    for name in ("default", "second"):
        model.set_adapter(name)
        found.append(engine(**inputs()).loss.item())
    with model.disable_adapter():
        found.append(engine(**inputs()).loss.item())
    assert len(set(found)) == len(found), "each does something"
    return found


def resized(folder: Path, keep_quantized: bool) -> Any:
    torch.manual_seed(0)
    engine = with_lora(folder, keep_quantized, lambda base: base.resize_token_embeddings(56))
    logits = engine(**inputs()).logits
    assert logits.shape[-1] == 56
    return logits[..., :48].tolist()


def cast(folder: Path, keep_quantized: bool) -> Any:
    return [three_losses(with_lora(folder, keep_quantized, change)) for change in (torch.nn.Module.half, to_fp32)]


def to_fp32(base: Any) -> None:
    base.to(torch.float32)


USES: tuple[Callable[[Path, bool], Any], ...]
USES = (generated, with_checkpointing, evaluated_between, with_several, resized, cast)


def used(folder: Path, uses: tuple[Callable[[Path, bool], Any], ...]) -> dict[str, list[Any]]:
    return {use.__name__: [use(folder, keep) for keep in (True, False)] for use in uses}


@pytest.mark.slow
def test_used_as_others(cluster: None, folder: Path) -> None:
    uses = USES
    for of_rank in run_ranks(2, used, folder, uses, timeout=200):
        for name, (packed, dequantised) in of_rank.items():
            assert packed == dequantised, name
