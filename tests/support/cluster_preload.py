"""What the fork server of `tests.support.cluster` imports once, so that every rank starts with it."""

import contextlib
import functools
import gc
import importlib.metadata
import os

import accelerate  # noqa: F401
import cpuinfo
import deepspeed  # noqa: F401
import pytest  # noqa: F401
import torch
import torch._inductor.compile_fx  # by which DeepSpeed's engine starts
import torch.distributed
import transformers.generation.utils
import transformers.modeling_utils
import transformers.models.auto.modeling_auto
import transformers.processing_utils  # noqa: F401
from transformers import conversion_mapping

from tests.support.extensions import load_extension


LATE = (
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "hf_zero_stream.auto",
    "hf_zero_stream.plugins.forecast.engine_memory",
    "hf_zero_stream.destinations.parallel",
    "hf_zero_stream.holdings.deepspeed.partitions",
    "hf_zero_stream.holdings.deepspeed.engine",
    "hf_zero_stream.holdings.deepspeed.holders",
    "hf_zero_stream.destinations.deepspeed.partitioned",
    "hf_zero_stream.loading.into",
    "hf_zero_stream.saving.save",
    "hf_zero_stream.state.hooks",
    "tests.support.saving",
    "tests.support.training_state",
    "transformers.models.bert.modeling_bert",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.models.gpt_oss.modeling_gpt_oss",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.t5.modeling_t5",
    "transformers.trainer",
)
"""What most ranks, or the slowest, would otherwise import when they first need it."""

for _name in LATE:
    with contextlib.suppress(ModuleNotFoundError):  # older versions have not all of them
        importlib.import_module(_name)
conversion_mapping.get_checkpoint_conversion_mapping("llama")  # makes its table, of all models, at the first call
cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)  # takes processes, and each extension asks twice
importlib.metadata.version = functools.cache(importlib.metadata.version)  # parses a file, and each load asks often
for _name in ("accelerate", "deepspeed", "hf_zero_stream", "peft", "safetensors", "torch", "transformers"):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version(_name)
if os.environ["DS_ACCELERATOR"] == "cpu":
    load_extension("ShareMemCommBuilder")  # so that no rank has to compile it
torch.set_num_threads(1)
gc.collect()
gc.freeze()
