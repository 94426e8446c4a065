"""Models without a checkpoint, and models that exist: ZeRO-3 cuts them part by part, and no device has all of one."""

from typing import Any

import deepspeed
import pytest
import torch
import transformers
from transformers.integrations import HfDeepSpeedConfig

import hf_zero_stream
from tests.paper_gpu.trials import zero_config
from tests.support.cluster import PAPER_GPUS, run_ranks
from tests.support.parity import whole_values


pytestmark = pytest.mark.usefixtures("paper_gpus")

SIZES: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 24}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
BLOCK = 512
"""What the allocator rounds sizes up to."""


def new_models() -> dict[str, Any]:
    config = transformers.LlamaConfig(**SIZES)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    sizes = [-(-param.nbytes // BLOCK) * BLOCK for param in model.parameters()]
    found: dict[str, Any] = {"whole": sum(sizes), "largest": max(sizes), "parts": sum(sizes) // 2 + BLOCK * len(sizes)}
    settings = zero_config(3, {})

    def peak(start: int = 0) -> int:
        seen = torch.cuda.max_memory_allocated() - start
        torch.cuda.reset_peak_memory_stats()
        return seen

    with hf_zero_stream.streaming():
        peak()
        before = torch.cuda.memory_allocated()
        deepspeed.zero.Init(module=model, config_dict_or_path=settings)
        found["of one that exists"] = peak(before)
        values = whole_values(model)
        found["same"] = all(torch.equal(values[name].cpu(), it) for name, it in expected.items())
        del model, values
        keeps = HfDeepSpeedConfig(settings)
        peak()
        before = torch.cuda.memory_allocated()
        made = transformers.AutoModelForCausalLM.from_config(config)
        found["of a new one"] = peak(before)
    found["same"] &= all(hasattr(param, "ds_tensor") for param in made.parameters())
    del keeps
    return found


def test_no_device_has_all_of_one() -> None:
    for found in run_ranks(2, new_models, on=PAPER_GPUS):
        assert found["same"]
        # The parts, and the parameters of one layer's module with those of the modules in it, twice.
        most = found["parts"] + 8 * found["largest"]
        assert found["of one that exists"] <= found["parts"] + 2 * found["largest"]
        assert found["of a new one"] < most < 0.75 * found["whole"], found
