"""accelerate's FSDP2: nothing is read before ``prepare`` but buffers, and then each rank reads its own shards.

accelerate has FSDP on accelerators only. What is not the CPU's own here is in
``tests/support/fsdp2.py::force_fsdp_on_cpu``.
"""

import copy
import functools
import gc
import io
import os
import pickle
import shutil
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import hf_zero_stream
from hf_zero_stream.errors import UnsupportedError
from tests import sampling
from tests.support.checkpoint_files import tensors_of
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.fsdp2 import ZooTraining, announce, count_lazy, force_fsdp_on_cpu, load, make_accelerator, train
from tests.support.trainers import FSDP2, arguments_of, losses_of, make_tokenizer
from tests.support.zoo import Checkpoint


def with_adapters(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]))


def frozen_and_cast(model: Any) -> Any:
    model.to(torch.bfloat16).model.embed_tokens.requires_grad_(False)
    model.gradient_checkpointing_enable()
    return model


def resized(model: Any) -> Any:
    model.resize_token_embeddings(320)
    return model


def written(model: Any) -> Any:
    """Initialised anew, copied from other rows and scaled; what was made of a parameter before stays as it was."""
    torch.manual_seed(1)
    head, embedding = model.lm_head.weight, model.get_input_embeddings().weight
    before = head.detach().clone()
    nn.init.normal_(head, std=0.02)
    embedding.data[5:7] = embedding.data[7:20].mean(0, keepdim=True)
    with torch.no_grad():
        torch._foreach_mul_(list(model.model.layers[0].mlp.parameters()), 0.5)
        head[:3] = before[:3] + embedding[5:8]
    model.model.norm.weight.data.numpy()[:2] = 0.5
    down = model.model.layers[0].mlp.down_proj
    down.weight, old = nn.Parameter(torch.zeros_like(down.weight)), down.weight
    down.weight.data = old.data * 0.75  # of a parameter that is not lazy
    return model


TRAININGS = {
    "plain": ZooTraining("llama"),
    "tied": ZooTraining("qwen3"),
    "mixture": ZooTraining("qwen3_moe"),
    "mixed precision, activation checkpointing": ZooTraining(
        "llama", "bf16", {"activation_checkpointing": True}, {"dtype": torch.bfloat16}
    ),
    "frozen, cast, gradient checkpointing": ZooTraining("llama", change=frozen_and_cast),
    "resized": ZooTraining("llama", change=resized),
    # Stock gives the optimizers of all but rank 0 one of the missing parameters in place of each of them.
    "missing": ZooTraining("llama", kwargs={"num_hidden_layers": 3}, stock_is_efficient=False),
    # Stock raises: a buffer that is saved is no DTensor.
    "saved buffers": ZooTraining("deepseek_v3", stock_is_efficient=False),
    # Without its efficient loading, stock shards what each rank has; with the same seed that is the same.
    "written": ZooTraining("llama", change=written),
    "adapters": ZooTraining("llama", change=with_adapters),
    "ignored": ZooTraining("llama", settings={"ignored_modules": r"model\.layers\.0"}),
}


def train_in_turn(titles: list[str], folders: dict[str, Path], efficient: bool) -> dict[str, list[dict[str, Any]]]:
    """Ours and stock's results of each training."""
    return {
        title: [
            training.run(folders[training.name], streams=streams, efficient=efficient) for streams in (True, False)
        ]
        for title, training in TRAININGS.items()
        if title in titles
    }


@pytest.mark.parametrize("efficient", [True, False])
@pytest.mark.sample(1)
def test_losses_equal_stock(cluster: None, zoo_checkpoint: Checkpoint, efficient: bool) -> None:
    folders = {training.name: zoo_checkpoint(training.name) for training in TRAININGS.values()}
    for found in run_ranks(2, train_in_turn, sampling.every(2, TRAININGS), folders, efficient, timeout=240):
        for title, (ours, stock) in found.items():
            assert ours["losses"] == stock["losses"], title
            assert len(set(ours["losses"])) == 3, title
            assert ours["lazy"] and not ours["left"] and not stock["lazy"], title
            report = ours["report"]
            assert report.bytes_read <= 1.05 * report.bytes_needed, title


def use_unprepared(folder: Path) -> dict[str, Any]:
    """What works on a lazy model as on a plain one, and what raises which error."""
    announce(cpu_ram_efficient_loading=True)
    make_accelerator()
    plain = transformers.AutoModelForCausalLM.from_config(load("llama", folder).config)
    plain.load_state_dict(tensors_of(folder))
    tokens = torch.tensor([[5, 6, 7]])

    def trained(model: Any) -> torch.Tensor:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)  # made while the model is lazy
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        return model.lm_head.weight.detach()

    def assigned(model: Any) -> torch.Tensor:
        model.lm_head.weight.data = model.lm_head.weight.data * 2
        return model(input_ids=tokens).logits

    def seen_by_others(model: Any) -> torch.Tensor:
        """A tensor that shares a parameter's memory, before and after the model has values."""
        data = model.lm_head.weight.data
        data[0] = 1
        first = model(input_ids=tokens).logits
        data[1] = 2
        return first + model(input_ids=tokens).logits

    def saved(model: Any) -> torch.Tensor:
        model.save_pretrained(folder.parent / f"saved {dist.get_rank()} {count_lazy(model)}")
        return model.lm_head.weight

    def copied(model: Any) -> torch.Tensor:
        return copy.deepcopy(model)(input_ids=tokens).logits

    uses: list[Callable[[Any], torch.Tensor]] = [
        lambda model: model.lm_head.weight.sum(),
        lambda model: model(input_ids=tokens).logits,
        lambda model: model.bfloat16()(input_ids=tokens).logits,
        lambda model: model.model(input_ids=tokens).last_hidden_state,
        lambda model: model.generate(input_ids=tokens, max_new_tokens=3, do_sample=False),
        lambda model: model.state_dict()["lm_head.weight"],
        lambda model: torch.tensor(model.num_parameters()),
        lambda model: nn.init.ones_(model.lm_head.weight).sum() + model(input_ids=tokens).logits,
        lambda model: model.lm_head.weight.data.mul_(2) + model.lm_head.weight.detach(),
        trained,
        assigned,
        seen_by_others,
        saved,
        copied,
    ]
    unequal = [
        number
        for number, use in enumerate(uses)
        if not torch.equal(use(load("llama", folder)), use(copy.deepcopy(plain)))
    ]
    refused: list[Callable[[Any], Any]] = [
        lambda model: model.lm_head.weight.data.t_(),
        lambda model: pickle.dumps(model),
        lambda model: torch.save(model.lm_head.weight, io.BytesIO()),
    ]
    messages = []
    for refuse in refused:
        with pytest.raises(UnsupportedError) as caught:
            refuse(load("llama", folder))
        messages.append(str(caught.value))
    del caught, uses, refused  # the error's frames hold a model
    gc.collect()
    is_restored = not isinstance(accelerate.accelerator.fsdp2_prepare_model, functools.partial)
    return {"unequal": unequal, "messages": messages, "restored": is_restored}


@pytest.mark.slow
def test_models_that_are_not_prepared(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    for found in run_ranks(2, use_unprepared, zoo_checkpoint("llama")):
        assert not found["unequal"], found
        assert all("memory" in message or "pickled" in message for message in found["messages"]), found
        assert found["restored"], "what was replaced must be put back when no lazy model lives"


def wrap_by_hand(folder: Path) -> dict[str, Any]:
    """FSDP2 is announced, and something else is put around the model, or on its parameters, by hand."""
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # a job's template: no arguments of a Trainer have said so
    arguments = sys.modules.pop("transformers.training_args", None)
    found: dict[str, Any] = {"exported alone": count_lazy(load("llama", folder))}
    if arguments is not None:
        sys.modules["transformers.training_args"] = arguments
    announce()
    tokens = torch.tensor([[5, 6, 7]])

    def hooked(model: Any) -> Any:
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda param: called.append(param))
        return model

    called: list[Any] = []
    for wrap in (nn.parallel.DistributedDataParallel, FullyShardedDataParallel, hooked):
        grads, lazy = [], []
        for streams in (True, False):
            called.clear()
            model = load("llama", folder, streams=streams)
            lazy.append(count_lazy(model))
            arguments = {"device_id": torch.device("cpu")} if wrap is FullyShardedDataParallel else {}
            wrapped = wrap(model, **arguments)
            wrapped(input_ids=tokens, labels=tokens).loss.backward()
            grads.append([param.grad for param in wrapped.parameters() if param.grad is not None])
            lazy.append(len(called))
        assert lazy[0] and not lazy[2], "one model is lazy until then, and one never"
        same = len(grads[0]) == len(grads[1]) and all(map(torch.equal, *grads))
        found[wrap.__name__] = same and lazy[1] == lazy[3]
    with pytest.raises(UnsupportedError, match=r"prepare it before you give its parameters") as caught:
        model = load("llama", folder)
        held = [weakref.ref(param) for param in model.parameters()]  # as an optimizer has that steps in the backward
        model(input_ids=tokens)
    found["held"] = f"{len(held) > 10} {type(caught.value.__cause__).__name__}"
    return found


def test_other_wrappers_by_hand(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """DDP and FSDP 1 get a model with values, and hooks of gradients stay; whoever cannot is told why."""
    wrappers = {"DistributedDataParallel": True, "FullyShardedDataParallel": True, "hooked": True}
    for found in run_ranks(2, wrap_by_hand, zoo_checkpoint("llama")):
        assert found == {"exported alone": 0, **wrappers, "held": "True RuntimeError"}


def prepare_after_use(folder: Path) -> list[list[float]]:
    """Ranks that have used the model before, two models in one, and the accelerators that do not shard."""
    found = []
    for users in ([], [0], [0, 1]):
        announce()
        accelerator = make_accelerator()
        model = load("llama", folder)
        if dist.get_rank() in users:
            model(input_ids=torch.tensor([[5]]))
        found.append(train(model, accelerator, "llama"))
    for streams in (True, False):
        announce()
        accelerator = make_accelerator()
        pair = Pair(*(load("llama", folder, streams=streams) for _ in range(2)))
        found.append(train(pair, accelerator, "llama"))
    for streams in (True, False):
        announce()
        model = load("llama", folder, streams=streams)
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ["ACCELERATE_USE_FSDP"] = "false"
        found.append(train(model, accelerate.Accelerator(cpu=True), "llama"))  # DistributedDataParallel
        assert not count_lazy(model)
    return found


class Pair(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, **inputs: Any) -> Any:
        output = self.first(**inputs)
        output.loss = output.loss + self.second(**inputs).loss
        return output


@pytest.mark.slow
def test_what_is_prepared(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    for of_none, of_one, of_all, pair, stock_pair, ddp, stock_ddp in run_ranks(
        2, prepare_after_use, zoo_checkpoint("llama")
    ):
        assert of_none == of_one == of_all
        assert pair == stock_pair and ddp == stock_ddp


def prepare_where_a_file_is_gone(folder: Path) -> None:
    announce()
    accelerator = make_accelerator()
    model = load("llama", folder)
    dist.barrier()
    if dist.get_rank() == 0:
        sorted(folder.glob("*.safetensors"))[0].unlink()
    dist.barrier()
    train(model, accelerator, "llama")


def test_a_lost_file_is_an_error_of_all_ranks(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = shutil.copytree(zoo_checkpoint("llama"), tmp_path / "model")
    for outcome in run_ranks_expecting_errors(2, prepare_where_a_file_is_gone, folder):
        assert outcome.error_type == "ReadError" and ".safetensors: cannot open" in (outcome.error_message or "")


def fine_tune(folder: Path, output: Path) -> list[Any]:
    """By the Trainer, whose arguments alone say that FSDP2 is going to shard the model."""
    found: list[Any] = []
    for streams in (True, False):
        force_fsdp_on_cpu()
        args = arguments_of(output, max_steps=3, save_strategy="no", **FSDP2)
        model = load("llama", folder, streams=streams)
        lazy = count_lazy(model)
        data = [{"input_ids": [5 + row, 6, 7], "labels": [5 + row, 6, 7]} for row in range(8)]
        trainer = transformers.Trainer(model, args, train_dataset=data)
        trainer.train()
        found.append((losses_of(trainer), bool(lazy), count_lazy(model)))
    return found


def test_trainer(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    for (losses, lazy, left), (stock, *_) in run_ranks(2, fine_tune, zoo_checkpoint("llama"), tmp_path):
        assert losses == stock and len(set(losses)) == 3
        assert lazy and not left


def fine_tune_by_trl(folder: Path, output: Path) -> list[Any]:
    """TRL calls ``from_pretrained`` itself, before it makes its Accelerator."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    found: list[Any] = []
    for streams in (True, False):
        force_fsdp_on_cpu()
        settings = {"max_steps": 3, "save_strategy": "no", "model_init_kwargs": {"dtype": "float32"}}
        args = arguments_of(output, SFTConfig, **settings, **FSDP2)
        data = Dataset.from_dict({"text": ["a small model learns words"] * 8})
        with hf_zero_stream.streaming() if streams else nullcontext():
            trainer = SFTTrainer(model=str(folder), args=args, train_dataset=data)
        lazy = count_lazy(trainer.model)
        trainer.train()
        found.append((losses_of(trainer), bool(lazy), count_lazy(trainer.model)))
    return found


@pytest.mark.slow
def test_trl(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = shutil.copytree(zoo_checkpoint("llama"), tmp_path / "model")
    make_tokenizer(folder)
    for (losses, lazy, left), (stock, *_) in run_ranks(2, fine_tune_by_trl, folder, tmp_path / "out"):
        assert losses == stock and len(set(losses)) == 3
        assert lazy and not left
