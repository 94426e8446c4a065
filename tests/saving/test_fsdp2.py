"""accelerate's and the Trainer's ways to save FSDP2 models, inside ``streaming()``: stock's files, and no gather."""

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from transformers import Trainer

import hf_zero_stream
from hf_zero_stream.seams.wrappers import belongs_to_trainer, note_trainer
from tests.support import fsdp2
from tests.support.checkpoint_files import tensors_of
from tests.support.cluster import run_ranks
from tests.support.live_sharded import evaluated, gathered, plain_model
from tests.support.saving import SHARD_SIZE, contents, different, gathers_counted, save_both_ways
from tests.support.sharded import Sizes, load_sharded
from tests.support.trainers import FSDP2, arguments_of
from tests.support.zoo import ZOO, Checkpoint


def prepared(accelerator: Any, model: Any) -> Any:
    """The model after ``prepare``, a training step and an eval."""
    trainable = [param for param in model.parameters() if param.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(trainable, lr=1e-2))
    model.train()
    accelerator.backward(model(**ZOO["llama"].inputs()).loss)
    optimizer.step()
    return evaluated(model)


def with_accelerate(checkpoint: Path, folder: Path) -> dict[str, dict[str, int]]:
    found = {}
    for name, precision, settings in (
        ("plain", "no", {}),
        ("checkpointed", "no", {"activation_checkpointing": True}),
        ("efficient", "no", {"cpu_ram_efficient_loading": True}),
        ("mixed", "bf16", {}),
    ):
        fsdp2.announce(**{"cpu_ram_efficient_loading": False, **settings})
        accelerator = fsdp2.make_accelerator(precision)
        model = prepared(accelerator, plain_model(checkpoint))
        found[name] = save_both_ways(accelerator, model, folder / name)
        whole = gathered(model, checkpoint)
        if dist.get_rank() == 0:
            whole.save_pretrained(folder / name / "whole" / "state dict", max_shard_size=SHARD_SIZE)
            with pytest.MonkeyPatch.context() as patches:
                patches.setattr(accelerator, "get_state_dict", lambda model: model.state_dict())
                accelerator.save_model(whole, folder / name / "whole" / "save_model", max_shard_size=SHARD_SIZE)
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3"])
def test_accelerate(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, name: str) -> None:
    for found in run_ranks(2, with_accelerate, zoo_checkpoint(name), tmp_path):
        for of_model, gathers in found.items():
            assert gathers == {"stock": 2, "ours": 0}, of_model
            for how in ("state dict", "save_model"):
                ours, stock, whole = (tmp_path / of_model / who / how for who in ("ours", "stock", "whole"))
                assert different(ours, whole) == [], (of_model, how)
                expected = tensors(stock)
                if name == "qwen3":  # a tied head, which stock gathers once more, and may save twice
                    assert expected.pop("lm_head.weight", None) in (None, expected["model.embed_tokens.weight"])
                assert tensors(ours) == expected, (of_model, how)


def tensors(folder: Path) -> dict[str, Any]:
    """Names and bytes of tensors. Stock gathers them in another order, so that its shards may be others."""
    return {name: (it.dtype, it.shape, it.numpy().tobytes()) for name, it in tensors_of(folder).items()}


def of_distributed_config(checkpoint: Path, folder: Path) -> None:
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    accelerator = accelerate.Accelerator(cpu=True)
    model = load_sharded(transformers.AutoModelForCausalLM, checkpoint, {"fsdp_size": 2})
    model = evaluated(accelerator.prepare_model(model, device_placement=False, evaluation_mode=True))
    with hf_zero_stream.streaming():
        accelerator.unwrap_model(model).save_pretrained(
            folder / "state dict",
            is_main_process=accelerator.is_main_process,
            state_dict=accelerator.get_state_dict(model),
            max_shard_size=SHARD_SIZE,
        )
        accelerator.save_model(model, folder / "save_model", max_shard_size=SHARD_SIZE)


def test_a_distributed_config_model_and_accelerate(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoint = zoo_checkpoint("llama")
    run_ranks(2, of_distributed_config, checkpoint, tmp_path)
    whole = plain_model(checkpoint)
    whole.save_pretrained(tmp_path / "whole", max_shard_size=SHARD_SIZE)
    accelerate.Accelerator(cpu=True).save_model(whole, tmp_path / "whole save_model", max_shard_size=SHARD_SIZE)
    assert different(tmp_path / "state dict", tmp_path / "whole") == []
    assert different(tmp_path / "save_model", tmp_path / "whole save_model") == []


def with_adapters(checkpoint: Path, folder: Path) -> None:
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    for name, in_peft in (("transformers", False), ("peft", True)):
        fsdp2.announce(cpu_ram_efficient_loading=False)
        accelerator = fsdp2.make_accelerator()
        torch.manual_seed(0)
        model = plain_model(checkpoint)
        if in_peft:
            model = peft.get_peft_model(model, lora)
        else:
            model.add_adapter(lora)
        model = prepared(accelerator, model)
        for who, context in (("stock", nullcontext()), ("ours", hf_zero_stream.streaming())):
            with context:
                accelerator.unwrap_model(model).save_pretrained(
                    folder / name / who,
                    is_main_process=accelerator.is_main_process,
                    state_dict=accelerator.get_state_dict(model),
                )
            accelerator.wait_for_everyone()


def test_adapters(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    run_ranks(2, with_adapters, zoo_checkpoint("llama"), tmp_path)
    for name in ("transformers", "peft"):
        assert "adapter_model.safetensors" in contents(tmp_path / name / "stock")
        assert different(tmp_path / name / "ours", tmp_path / name / "stock") == []


def with_trainer(checkpoint: Path, folder: Path, sizes: Sizes | None, fsdp_config: dict[str, Any]) -> dict[str, int]:
    """Train with stock's saves and with ours; how often the model was gathered."""
    found = {}
    sharded = fsdp_config.get("state_dict_type") == "SHARDED_STATE_DICT"
    streaming = hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(training_state=not sharded))
    for who, context in (("stock", nullcontext()), ("ours", streaming)):
        if sizes is None:
            fsdp2.announce(cpu_ram_efficient_loading=False)
            fsdp2.force_fsdp_on_cpu()
        settings: dict[str, Any] = {"accelerator_config": None, "use_cpu": True}
        if sizes is None:
            settings = {"fsdp": True, "fsdp_config": dict(fsdp_config)}
        how = {"max_steps": 2, "save_steps": 2, "save_only_model": not sharded}
        arguments = arguments_of(folder / who / "run", **how, **settings)
        with context, gathers_counted() as gathers:
            if sizes is None:
                model = plain_model(checkpoint)
            else:
                model = load_sharded(transformers.AutoModelForCausalLM, checkpoint, sizes)
            ids = torch.arange(16) * 37 % 300
            trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": ids, "labels": ids}] * 8)
            trainer.train()
            trainer.evaluate(trainer.train_dataset)
            trainer.save_model(str(folder / who / "final"))
            dist.barrier()
        found[who] = len(gathers)
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("sizes", [None, {"fsdp_size": 2}], ids=["fsdp2", "distributed_config"])
def test_trainer(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, sizes: Sizes | None) -> None:
    for gathers in run_ranks(2, with_trainer, zoo_checkpoint("qwen3_moe"), tmp_path, sizes, {"version": 2}):
        assert gathers == {"stock": 2, "ours": 0}
    for folder in ("final", "run/checkpoint-2"):
        names = different(tmp_path / "ours" / folder, tmp_path / "stock" / folder)
        assert set(names) <= {"training_args.bin", "trainer_state.json"}
        assert (tmp_path / "ours" / folder / "model.safetensors").exists()


def test_trainer_with_sharded_state_dicts(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Without our training states: torch's distributed checkpoints, and no ``save_model`` writes weights."""
    config = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}
    run_ranks(2, with_trainer, zoo_checkpoint("llama"), tmp_path, None, config)
    ours, stock = contents(tmp_path / "ours"), contents(tmp_path / "stock")
    assert ours.keys() == stock.keys()
    assert not any(name.endswith(".safetensors") for name in ours) and any(name.endswith(".distcp") for name in ours)


def with_own_save_model(checkpoint: Path, folder: Path) -> dict[str, int]:
    """A Trainer that asks for the state dict itself, and saves on rank 0 alone."""

    class OwnTrainer(Trainer):
        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            state_dict = self.accelerator.get_state_dict(self.model)
            if self.args.should_save:
                self._save(output_dir, state_dict=state_dict)

    fsdp2.announce(cpu_ram_efficient_loading=False)
    fsdp2.force_fsdp_on_cpu()
    arguments = arguments_of(folder / "run", max_steps=1, save_strategy="no", **FSDP2)
    ids = torch.arange(16) * 37 % 300
    samples = [{"input_ids": ids, "labels": ids}] * 8
    trainer = OwnTrainer(model=plain_model(checkpoint), args=arguments, train_dataset=samples)
    trainer.train()
    trainer.save_model(str(folder / "stock"))
    with hf_zero_stream.streaming(), gathers_counted() as gathers:
        trainer.save_model(str(folder / "ours"))
    dist.barrier()
    return {"ours": len(gathers)}


def test_a_trainer_that_asks_for_the_values(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """It gets them, as without streaming: only rank 0 is going to save."""
    found = run_ranks(2, with_own_save_model, zoo_checkpoint("llama"), tmp_path)
    assert found == [{"ours": 1}] * 2
    assert (tmp_path / "ours" / "model.safetensors").exists()
    assert different(tmp_path / "ours", tmp_path / "stock") == []


class Generates:
    def generate(self) -> None: ...


def test_whose_accelerator_it_is() -> None:
    import transformers.trainer  # noqa: F401 - there may be Trainers

    accelerator: Any = SimpleNamespace(state=SimpleNamespace())
    model: Any = Generates()
    assert not belongs_to_trainer(accelerator, model)
    note_trainer(SimpleNamespace(accelerator=accelerator))
    assert belongs_to_trainer(accelerator, model)
    used_before: Any = SimpleNamespace(state=SimpleNamespace())
    model.generate = Generates.generate  # as under FSDP2
    assert belongs_to_trainer(used_before, model)
