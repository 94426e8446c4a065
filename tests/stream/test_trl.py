"""TRL's GRPO gives vLLM the same tensors as without streaming(), under the same names, and gathers nothing for it."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import peft
import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_zero_stream
from examples.vllm_on_cpu import stand_in
from hf_zero_stream.errors import HfZeroStreamError
from tests.support.checkpoint_files import differing
from tests.support.cluster import free_port, run_ranks, run_ranks_expecting_errors
from tests.support.engine_servers import VLLMServer
from tests.support.fsdp2 import announce, force_fsdp_on_cpu
from tests.support.parity import ds_config, load_with
from tests.support.streams import counted_gathers
from tests.support.trainers import ZERO_3, arguments_of, join_as_launched, make_tokenizer
from tests.support.zoo import Checkpoint


STEPS = 3


def no_accelerator(check_available: bool = False) -> torch.device | None:
    """For a trainer of TRL's that asks for the kind of one even with a server."""
    return None if check_available else torch.device("cpu")


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(number % 2) for number, _ in enumerate(completions)]


def train(
    folder: Path,
    output: Path,
    home: str,
    stream: bool,
    adapts: bool,
    url: str,
    look: Callable[[str], Any] | None = None,
    method: str = "GRPO",
) -> dict[str, Any]:
    """Three steps with a sync before each. `seen`: what `look` finds at the server after each, on rank 0."""
    stand_in(output / f"rank {dist.get_rank()}")
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    options: dict[str, Any] = {}
    more: dict[str, Any] = {}
    if home == "zero3":
        options |= ZERO_3
    else:
        announce()
        force_fsdp_on_cpu()
        options |= {"fsdp": True, "fsdp_config": {"fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
    if home == "zero3":
        join_as_launched()
    if method == "GRPO":
        config, trainer_class = GRPOConfig, GRPOTrainer
        options |= {"max_completion_length": 4, "num_generations": 2}
    else:
        config, trainer_class = OnlineDPOConfig, OnlineDPOTrainer
        options |= {"max_new_tokens": 4}
    args = arguments_of(
        output / "out",
        config,
        per_device_train_batch_size=2,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        vllm_group_port=free_port(),
        max_steps=STEPS,
        gradient_accumulation_steps=1,
        learning_rate=1e-2,
        gradient_checkpointing=False,
        generation_kwargs={"seed": 1},
        save_strategy="no",
        **options,
    )
    data = Dataset.from_dict({"prompt": ["a small model learns words"] * 16})
    torch.manual_seed(0)
    with hf_zero_stream.streaming() if stream else nullcontext(), ExitStack() as stack:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
        if method != "GRPO":
            more["ref_model"] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            stack.enter_context(patch.object(torch.accelerator, "current_accelerator", no_accelerator))
        trainer = trainer_class(
            model=model,
            args=args,
            train_dataset=data,
            processing_class=AutoTokenizer.from_pretrained(folder),
            **more,
            reward_funcs=reward,
            peft_config=peft.LoraConfig(r=3, target_modules=["q_proj"]) if adapts else None,
        )
        gathers: list[str] = []
        seen: list[Any] = []
        own, name = (trainer.vllm_generation, "sync_weights") if method == "GRPO" else (trainer, "_move_model_to_vllm")
        sync = getattr(own, name)

        def counted_sync() -> None:
            with counted_gathers() as noted:
                sync()
            gathers.extend(noted)
            if look is not None and dist.get_rank() == 0:
                seen.append(look(url))

        setattr(own, name, counted_sync)
        trainer.train()
    losses = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]
    return {"losses": losses, "gathers": len(gathers), "seen": seen}


CALLS = ["start_weight_update", "update_weights", "finish_weight_update", "reset_prefix_cache"]


@pytest.fixture
def started() -> Iterator[Callable[..., VLLMServer]]:
    servers: list[VLLMServer] = []

    def start(*args: Any) -> VLLMServer:
        servers.append(VLLMServer(*args))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize("adapts", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("home", ["zero3", "fsdp2"])
def test_grpo(
    cluster: None,
    zoo_checkpoint: Checkpoint,
    started: Callable[..., VLLMServer],
    tmp_path: Path,
    home: str,
    adapts: bool,
) -> None:
    folder = shutil.copytree(zoo_checkpoint("qwen3_moe"), tmp_path / "model")
    make_tokenizer(folder)
    ours, stock = started(str(folder)), started(str(folder))
    streamed, *others = run_ranks(2, train, folder, tmp_path / "ours", home, True, adapts, ours.url)
    plain, *_ = run_ranks(2, train, folder, tmp_path / "stock", home, False, adapts, stock.url)
    assert len(ours.updates) == len(stock.updates) == STEPS
    for number, (mine, theirs) in enumerate(zip(ours.updates, stock.updates, strict=True)):
        if adapts and number:  # TRL has merged adapters into its model and taken them out again, with roundings
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
        else:
            assert differing(mine, theirs) == []
    assert differing(*ours.updates[:2]), "the steps change the weights"
    assert len(plain["losses"]) == STEPS
    losses = [torch.tensor(found["losses"], dtype=torch.float64) for found in (streamed, plain)]
    torch.testing.assert_close(*losses, rtol=1e-5 if adapts else 0, atol=0)
    assert streamed["gathers"] == others[0]["gathers"] == 0 < plain["gathers"]
    for server in (ours, stock):
        assert [path for path in server.paths if path in CALLS] == CALLS * STEPS


@pytest.mark.parametrize("route", CALLS[:3])
def test_no_call_is_made_again(
    cluster: None, zoo_checkpoint: Checkpoint, started: Callable[..., VLLMServer], tmp_path: Path, route: str
) -> None:
    """TRL's session would make it again after an error: the server would wait for bytes that nobody sends."""
    folder = shutil.copytree(zoo_checkpoint("qwen3_moe"), tmp_path / "model")
    make_tokenizer(folder)
    server = started(str(folder), {route: lambda: (500, {"error": "out of memory"})})
    args = folder, tmp_path / "out", "zero3", True, False, server.url
    for outcome in run_ranks_expecting_errors(2, train, *args):
        assert outcome.error_type == "StreamError", outcome.traceback
        assert f"{route} answered 500" in str(outcome.error_message)
    assert server.paths.count(route) == 1


def sync_colocated(checkpoint: Path, folder: Path) -> list[str]:
    """What a rank hears of an error of the engine on rank 1, when it loads a tensor and when it wakes up."""
    stand_in(folder / f"rank {dist.get_rank()}")
    from trl.generation.vllm_generation import VLLMGeneration

    def fail_on_one_rank(*_: Any, **kwargs: Any) -> None:
        if dist.get_rank() == 1:
            raise MemoryError(f"an engine has no memory {kwargs}")

    state = PartialState(backend="gloo")
    module = SimpleNamespace(load_weights=fail_on_one_rank)
    executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=SimpleNamespace(model=module)))
    llm = SimpleNamespace(llm_engine=SimpleNamespace(model_executor=executor), wake_up=fail_on_one_rank)
    heard: list[str] = []
    with hf_zero_stream.streaming():
        model = load_with("streamed", "AutoModelForCausalLM", checkpoint, ds_config(), {})
        for sleeps in (False, True):
            generation = VLLMGeneration.__new__(VLLMGeneration)
            vars(generation).update(mode="colocate", enable_sleep_mode=sleeps, model=model, llm=llm, accelerator=state)
            with pytest.raises((HfZeroStreamError, MemoryError)) as caught:
                generation.sync_weights()
            heard.append(f"{caught.typename}: {caught.value}")
    return heard


def test_an_error_of_a_colocated_engine(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The rank holds it, and the pass with it; nobody waits for it."""
    first, second = run_ranks(2, sync_colocated, zoo_checkpoint("llama"), tmp_path, timeout=60)
    for heard, error, what in zip(first, second, ("{}", "{'tags': ['weights']}"), strict=True):
        assert error == f"MemoryError: an engine has no memory {what}"
        assert heard == f"PeerError: rank 1 failed, so this rank gives up too: {error}"


@pytest.mark.slow
def test_online_dpo(
    cluster: None, zoo_checkpoint: Checkpoint, started: Callable[..., VLLMServer], tmp_path: Path
) -> None:
    folder = shutil.copytree(zoo_checkpoint("llama"), tmp_path / "model")
    make_tokenizer(folder)
    ours, stock = started(str(folder)), started(str(folder))
    arms = [
        run_ranks(2, train, folder, tmp_path / name, "zero3", streams, False, server.url, None, "online DPO")
        for name, streams, server in (("ours", True, ours), ("stock", False, stock))
    ]
    assert len(ours.updates) == len(stock.updates) == STEPS
    for mine, theirs in zip(ours.updates, stock.updates, strict=True):
        assert differing(mine, theirs) == []
    assert differing(*ours.updates[:2]), "the steps change the weights"
    assert arms[0][0]["losses"] == arms[1][0]["losses"]
    assert [found["gathers"] for found in arms[0]] == [0, 0] and arms[1][0]["gathers"] > 0
    assert ours.paths.count("update_weights") == STEPS < stock.paths.count("update_weights")
