"""What a user does first, in each home, beside stock: load, train, save, resume. Run by ``torchrun`` on two ranks.

Each line that it prints on rank 0 is one home and what came of it.
"""

from __future__ import annotations

import copy
import inspect
import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import AutoModelForCausalLM

import hf_zero_stream


TOKENS = torch.arange(16)[None] % 64
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}}


def make_checkpoint(folder: Path) -> None:
    """A mixture of experts, whose fused weights transformers makes of several tensors of the checkpoint."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **heads, **experts)).save_pretrained(folder)


def steps(forward: Any, backward: Callable[[Any], object], step: Callable[[], object], count: int) -> list[float]:
    losses = []
    for _ in range(count):
        loss = forward(input_ids=TOKENS, labels=TOKENS).loss
        backward(loss)
        step()
        losses.append(loss.item())
    return losses


def whole(param: Any) -> torch.Tensor:
    if hasattr(param, "full_tensor"):
        return param.full_tensor().detach().clone().cpu()
    if hasattr(param, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([param]):
            return param.detach().clone().cpu()
    return param.detach().clone().cpu()


def zero(stage: int, folder: Path, out: Path) -> tuple[Any, list[float], list[float]]:
    """Values after the load; losses of a training that goes on, and of one that is resumed."""
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "optimizer": ADAMW}
    kept = HfDeepSpeedConfig(copy.deepcopy(config))

    def begin() -> tuple[Any, Any]:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        loaded = {name: whole(param) for name, param in model.named_parameters()}
        return deepspeed.initialize(model=model, config=copy.deepcopy(kept.config))[0], loaded

    engine, values = begin()
    steps(engine, engine.backward, engine.step, 2)
    engine.save_checkpoint(str(out))
    losses = steps(engine, engine.backward, engine.step, 2)
    engine, _ = begin()
    engine.load_checkpoint(str(out))
    return values, losses, steps(engine, engine.backward, engine.step, 2)


def sharded(folder: Path, out: Path) -> tuple[Any, list[float], list[float]]:
    from transformers.distributed import DistributedConfig

    if "fsdp_size" not in inspect.signature(DistributedConfig).parameters:
        raise ModuleNotFoundError(name="fsdp_size")
    sharding = DistributedConfig(fsdp_size=2)

    def begin() -> tuple[Any, Any, Any]:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=sharding)
        values = {name: whole(param) for name, param in model.named_parameters()}
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3), values

    return _with_states(begin, out)


def replicas(folder: Path, out: Path) -> tuple[Any, list[float], list[float]]:
    def begin() -> tuple[Any, Any, Any]:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        values = {name: whole(param) for name, param in model.named_parameters()}
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3), values

    return _with_states(begin, out)


def _with_states(begin: Callable[[], tuple[Any, Any, Any]], out: Path) -> tuple[Any, list[float], list[float]]:
    model, optimizer, values = begin()

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    steps(model, lambda loss: loss.backward(), step, 2)
    hf_zero_stream.save_state(model, out, optimizer=optimizer)
    losses = steps(model, lambda loss: loss.backward(), step, 2)
    model, optimizer, _ = begin()
    hf_zero_stream.load_state(model, out, optimizer=optimizer)
    return values, losses, steps(model, lambda loss: loss.backward(), step, 2)


HOMES: dict[str, Callable[[Path, Path], tuple[Any, list[float], list[float]]]] = {
    "ZeRO-3": lambda *args: zero(3, *args),
    "ZeRO-2": lambda *args: zero(2, *args),
    "distributed_config": sharded,
    "replicas": replicas,
}


def outcome(home: str, folder: Path, out: Path, plain: dict[str, torch.Tensor]) -> str:
    with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(progress=False)):
        values, losses, resumed = HOMES[home](folder, out / home)
    wrong = [name for name in plain if not torch.equal(values[name], plain[name])]
    if wrong:
        return f"wrong values: {', '.join(wrong[:4])}"
    is_same = all(abs(mine - theirs) < 1e-5 for mine, theirs in zip(resumed, losses, strict=True))
    return "right" if is_same else f"resumed with {resumed}, not {losses}"


def main(homes: list[str]) -> None:
    dist.init_process_group("gloo")
    names = [tempfile.mkdtemp()]
    dist.broadcast_object_list(names)
    folder = Path(names[0], "checkpoint")
    if dist.get_rank() == 0:
        make_checkpoint(folder)
    dist.barrier()
    plain = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
    for home in homes or HOMES:
        try:
            what = outcome(home, folder, Path(names[0]), plain)
        except ModuleNotFoundError as error:
            what = f"not in this version ({error.name})"
        except Exception as error:
            traceback.print_exc()
            what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if dist.get_rank() == 0:
            print(json.dumps({"home": home, "outcome": what}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
