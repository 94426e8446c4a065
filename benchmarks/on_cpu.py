"""Run a tool's module on a machine without GPUs: DeepSpeed over gloo, which accelerate would not choose by itself.

torchrun --nproc_per_node 2 -m hf_zero_stream.run -m benchmarks.on_cpu swift.cli.sft $(cat examples/swift/sft.args)
"""

import os
import runpy
import sys


os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}

from accelerate import PartialState  # noqa: E402 - reads the environment


if __name__ == "__main__":
    PartialState(backend="gloo")
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
