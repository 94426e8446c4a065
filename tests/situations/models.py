"""The models of situations: tiny, and changed as users change them after they have loaded them."""

import contextlib
import functools
from pathlib import Path
from typing import Any

import deepspeed
import peft
import torch
import torch.distributed as dist
import transformers
import transformers.distributed
from peft import LoraConfig
from torch import nn

from tests.situations.axes import Situation


ROWS = 77
"""An odd vocabulary."""
EVEN_ROWS = 80
NEW_ROWS = 96

_WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_LLAMA = {**_WIDTHS, "vocab_size": ROWS, "num_key_value_heads": 2, "pad_token_id": 0}


def _llama(**more: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**_LLAMA, **more}))


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=ROWS, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config)


def _moe() -> nn.Module:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**_LLAMA, **experts))


def _bert() -> nn.Module:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertModel(transformers.BertConfig(**_WIDTHS, vocab_size=ROWS, **dropout))


MODELS = {
    "llama": (_llama, "AutoModelForCausalLM"),
    "even": (lambda: _llama(vocab_size=EVEN_ROWS), "AutoModelForCausalLM"),
    "tied": (lambda: _llama(tie_word_embeddings=True), "AutoModelForCausalLM"),
    "gpt2": (_gpt2, "AutoModelForCausalLM"),
    "moe": (_moe, "AutoModelForCausalLM"),
    "bert_classifier": (_bert, "AutoModelForSequenceClassification"),
}
"""What makes the checkpoint of each, and the class that loads it: the classifier's head is new."""


def make(folder: Path) -> None:
    """Save a checkpoint of each."""
    for name, (create, _) in MODELS.items():
        torch.manual_seed(0)
        create().save_pretrained(folder / name)


def inputs_of(situation: Situation, step: int, part: int) -> dict[str, torch.Tensor]:
    """The tokens of a step; `part`: of which rank, if ranks have different ones."""
    generator = torch.Generator().manual_seed(100 * step + part)
    tokens = torch.randint(5, NEW_ROWS if "resized" in situation.change else ROWS, (2, 9), generator=generator)
    if situation.model == "bert_classifier":
        return {"input_ids": tokens, "labels": torch.tensor([step % 2, part % 2])}
    return {"input_ids": tokens, "labels": tokens}


def load(situation: Situation, folder: Path) -> Any:
    """Load the model of a situation and change it, as a script does."""
    dtype = torch.bfloat16 if situation.precision == "bf16" and not situation.by_fsdp else torch.float32
    model_class = getattr(transformers, MODELS[situation.model][1])
    model = model_class.from_pretrained(
        folder / situation.model, dtype=dtype, **_sharding(situation), **_dropout(situation)
    )
    for part in _CHANGES[situation.change]:
        model = part(model)
    if situation.habit == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _dropout(situation: Situation) -> dict[str, Any]:
    """Arguments by which a model draws random numbers in each step."""
    names = {"gpt2": ("resid_pdrop", "attn_pdrop"), "bert_classifier": ("hidden_dropout_prob",)}
    used = names.get(situation.model, ("attention_dropout",)) if situation.habit == "dropout" else ()
    return dict.fromkeys(used, 0.1)


def _sharding(situation: Situation) -> dict[str, Any]:
    """Arguments by which transformers shards a model over all ranks."""
    name = {"fsdp2_at_load": "fsdp_size", "tp_at_load": "tp_size"}.get(situation.home)
    if name is None or dist.get_world_size() == 1:
        return {}
    return {"distributed_config": transformers.distributed.DistributedConfig(**{name: dist.get_world_size()})}


def _resize(model: Any) -> Any:
    model.resize_token_embeddings(NEW_ROWS, mean_resizing=False)
    return model


def _freeze(model: Any) -> Any:
    for name, param in model.named_parameters():
        if "embed" in name or ".wte." in name or "0" in name:
            param.requires_grad_(False)
    return model


class _Head(nn.Module):
    """A head that reads the logits, and adds to the loss."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 3, dtype=dtype)

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return self.proj(logits.to(self.proj.weight.dtype)).square().mean()


def _add_head(model: Any) -> Any:
    config = model.config
    width = config.num_labels if "Classification" in type(model).__name__ else config.vocab_size
    model.extra_head = _Head(width, model.dtype)

    def add(module: Any, args: Any, output: Any) -> Any:
        output.loss = output.loss + module.extra_head(output.logits)
        return output

    model.register_forward_hook(add)
    return model


def _add_buffer(model: Any) -> Any:
    """A buffer that counts the calls, and by which the loss is divided."""
    model.register_buffer("calls", torch.zeros(3))

    def count(module: Any, args: Any, output: Any) -> Any:
        if module.training:
            module.calls += 1
        output.loss = output.loss / (1 + module.calls[0])
        return output

    model.register_forward_hook(count)
    return model


def _add_own_buffer(model: Any) -> Any:
    """A buffer that each rank fills from its own batches, and by which its loss is divided."""
    model.register_buffer("scale", torch.ones(3))

    def follow(module: Any, args: Any, output: Any) -> Any:
        if module.training:
            module.scale.mul_(0.5).add_(output.loss.detach())
        output.loss = output.loss / module.scale[0]
        return output

    model.register_forward_hook(follow)
    return model


def _share_layer(model: Any) -> Any:
    layers = model.model.layers
    layers[1].mlp = layers[0].mlp
    return model


def _adapt(model: Any, **more: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    targets = {"gpt2": ["c_attn"], "bert": ["query", "value"]}.get(model.config.model_type, ["q_proj", "v_proj"])
    kind = None if "Classification" in type(model).__name__ else "CAUSAL_LM"
    return get_peft_model(model, LoraConfig(target_modules=targets, task_type=kind, r=2, **more))


def _adapt_by(kind: str, **more: Any) -> Any:
    """Adapters of another kind than LoRA."""

    def adapt(model: Any) -> Any:
        is_classifier = "Classification" in type(model).__name__
        task = "SEQ_CLS" if is_classifier else "CAUSAL_LM"
        return peft.get_peft_model(model, getattr(peft, kind)(task_type=task, **more))

    return adapt


def _adapt_and_save_modules(model: Any) -> Any:
    return _adapt(model, modules_to_save=["classifier" if hasattr(model, "classifier") else "lm_head"])


def _edit(model: Any) -> Any:
    """Change a frozen weight by hand: what no checkpoint has."""
    weight = model.get_input_embeddings().weight
    gathered = hasattr(weight, "ds_id")
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0) if gathered else contextlib.nullcontext():
        with torch.no_grad():
            weight.data.add_(torch.rand(weight.shape[-1]).to(weight.dtype))
    return model


def _merge(model: Any) -> Any:
    """Put trained adapters into the base."""
    adapted = _adapt(model, init_lora_weights=False)
    params = list(adapted.parameters())
    gathered = any(hasattr(param, "ds_id") for param in params)
    with deepspeed.zero.GatheredParameters(params, modifier_rank=0) if gathered else contextlib.nullcontext():
        return adapted.merge_and_unload()


def _widen_head(model: Any) -> Any:
    model.extra_head.float()
    return model


class _Counter(nn.Module):
    """Keeps a number that is neither a parameter nor a buffer, as layers for FP8 keep their scales."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return loss / self.calls


def _add_extra_state(model: Any) -> Any:
    model.counter = _Counter()

    def count(module: Any, args: Any, output: Any) -> Any:
        output.loss = module.counter(output.loss)
        return output

    model.register_forward_hook(count)
    return model


def _second_adapter(model: Any) -> Any:
    model.add_adapter("second", LoraConfig(target_modules=model.peft_config["default"].target_modules, r=3))
    return model


_CHANGES: dict[str, tuple[Any, ...]] = {
    "none": (),
    "resized": (_resize,),
    "frozen": (_freeze,),
    "head": (_add_head,),
    "buffer": (_add_buffer,),
    "own_buffer": (_add_own_buffer,),
    "shared_layer": (_share_layer,),
    "lora": (_adapt,),
    "lora_resized": (_resize, _adapt),
    "lora_modules_to_save": (_adapt_and_save_modules,),
    "lora_frozen_head": (_add_head, _adapt),
    "lora_edited_base": (_edit, _adapt),
    "lora_merged_before": (_merge, _adapt),
    "lora_two_adapters": (_adapt, _second_adapter),
    "lora_buffer": (_add_buffer, _adapt),
    "lora_dora": (functools.partial(_adapt, use_dora=True),),
    "lora_ia3": (_adapt_by("IA3Config"),),
    "lora_vera": (_adapt_by("VeraConfig", r=4),),
    "lora_prompt": (_adapt_by("PromptTuningConfig", num_virtual_tokens=3),),
    "fp32_head": (_add_head, _widen_head),
    "extra_state": (_add_extra_state,),
}
