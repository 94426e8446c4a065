"""What the Trainer and accelerate save of trained models that were dequantised while they were loaded is plain."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin

import hf_zero_stream
from tests.support.checkpoint_files import differing, tensors_of
from tests.support.cluster import run_ranks
from tests.support.fsdp2 import announce, force_fsdp_on_cpu
from tests.support.packed_training import dequantised, inputs
from tests.support.parity import ds_config
from tests.support.quantised_checkpoints import fp8, mxfp4
from tests.support.trainers import FSDP2, arguments_of, join_as_launched
from tests.support.whole import whole_values


FORMATS: dict[str, Callable[[Path], None]] = {"fp8": fp8, "mxfp4": mxfp4}


def load(folder: Path) -> Any:
    folder, how = dequantised(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **how)


def announce_home(home: str) -> dict[str, Any]:
    """What a launcher announces; returns the Trainer's arguments for it."""
    if home == "FSDP2":
        announce(cpu_ram_efficient_loading=True)
        force_fsdp_on_cpu()
        return FSDP2
    join_as_launched()
    config = ds_config(torch.bfloat16)
    del config["optimizer"]
    return {"deepspeed": config | {"zero_allow_untested_optimizer": True}, "bf16": True, "use_cpu": True}


def by_trainer(home: str, folder: Path, target: Path) -> Any:
    """A step, the checkpoint after it, and ``save_model``."""
    arguments = arguments_of(target, max_steps=1, save_steps=1, learning_rate=1e-2, **announce_home(home))
    model = load(folder)
    rows = [{name: value[0] for name, value in inputs(seed=seed).items()} for seed in range(8)]
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)  # type: ignore[arg-type]
    trainer.train()
    trainer.save_model(str(target / "saved"))
    return model


def by_accelerate(home: str, folder: Path, target: Path) -> Any:
    """A step, and ``accelerator.save_model``."""
    config = announce_home(home).get("deepspeed")
    accelerator = Accelerator(deepspeed_plugin=None if config is None else DeepSpeedPlugin(hf_ds_config=config))
    model = load(folder)
    loader = torch.utils.data.DataLoader([0, 1], batch_size=1)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trained, optimizer, _ = accelerator.prepare(model, optimizer, loader)
    accelerator.backward(trained(**inputs()).loss)
    optimizer.step()
    accelerator.save_model(trained, str(target / "saved"))
    if accelerator.is_main_process:
        model.config.save_pretrained(target / "saved")
    return model


SAVERS = {"Trainer": by_trainer, "accelerate": by_accelerate}


def save(home: str, saver: str, folder: Path, target: Path) -> tuple[dict[str, torch.Tensor], bool]:
    """The values in memory after the save, and whether the step has changed them."""
    with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(progress=False)):
        model = SAVERS[saver](home, folder, target)
        values = whole_values(model)
    return values, bool(differing(values, dict(load(folder).state_dict())))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("home", ["ZeRO-3", "FSDP2"])
@pytest.mark.parametrize("saver", SAVERS)
def test_saved_as_plain(cluster: None, tmp_path: Path, saver: str, home: str, name: str) -> None:
    FORMATS[name](folder := tmp_path / "model")
    (values, is_changed), _ = run_ranks(2, save, home, saver, folder, tmp_path / "out", timeout=300)
    assert is_changed
    saved = [tmp_path / "out" / "saved", *(tmp_path / "out").glob("checkpoint-*")]
    assert len(saved) == (2 if saver == "Trainer" else 1)
    for each in saved:
        tensors = tensors_of(each, "model*.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} <= {torch.bfloat16, torch.float32}
        assert not [key for key in tensors if key.endswith(("_scale_inv", "_scales", "_blocks"))]
        assert "quantization_config" not in json.loads((each / "config.json").read_text())
        again = transformers.AutoModelForCausalLM.from_pretrained(each, dtype=torch.bfloat16)
        assert differing(dict(again.state_dict()), values) == []
