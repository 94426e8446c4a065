"""What the fork server of `tests.cluster` imports once, so that every rank starts with it."""

import fcntl
import gc
import os
from pathlib import Path

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
from deepspeed.accelerator import get_accelerator
from torch.utils.cpp_extension import get_default_build_root

import hf_zero_stream.destinations.deepspeed.partitioned
import hf_zero_stream.loading.into
import hf_zero_stream.saving.save
import hf_zero_stream.state.hooks  # noqa: F401


def load_shared_memory_op() -> None:
    """Compile (the first time) and load `deepspeed_shm_comm`, so that no rank has to.

    A compiler killed half-way leaves a lock file that every later process would wait for without end.
    Whoever holds our own lock is the only one compiling, and may remove that file.
    """
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    root.mkdir(parents=True, exist_ok=True)
    with open(root / f"{builder.NAME}.flock", "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        for stale in root.glob(f"**/{builder.NAME}/lock"):
            stale.unlink()
        builder.load(verbose=False)


load_shared_memory_op()
torch.set_num_threads(1)
gc.collect()
gc.freeze()
