"""What the fork server of `tests.cluster` imports once, so that every rank starts with it."""

import gc
import os

import accelerate  # noqa: F401
import deepspeed  # noqa: F401
import pytest  # noqa: F401
import torch
import torch._inductor.compile_fx  # by which DeepSpeed's engine starts
import torch.distributed
import transformers.generation.utils
import transformers.modeling_utils
import transformers.models.auto.modeling_auto
import transformers.processing_utils  # noqa: F401

import hf_zero_stream.destinations.deepspeed.partitioned
import hf_zero_stream.loading.into
import hf_zero_stream.saving.save
import hf_zero_stream.state.hooks  # noqa: F401
from tests.extensions import load_extension


if os.environ["DS_ACCELERATOR"] == "cpu":
    load_extension("ShareMemCommBuilder")  # so that no rank has to compile it
torch.set_num_threads(1)
gc.collect()
gc.freeze()
