"""Memory of quantised models that stay packed under ZeRO-3: what a rank holds, and what a forward pass adds.

    python -m benchmarks.packed                       # 2 ranks, five formats
    python -m benchmarks.packed --ranks 3 --json packed.json

Each checkpoint has random values, in two layers. DeepSpeed gathers one module at a time and frees it at once: nothing
is prefetched, and small parameters are gathered too. Memory is counted by torch's profiler: the bytes that the
allocator gives and takes back in the thread of the forward pass, from the second step on, when buffers are there.
`kept` is what is still allocated when the forward pass has ended, which autograd keeps for the backward pass. `peak`
is the most at one time. A gathered buffer of which gloo's own thread is the last holder seems to stay: torch does not
report what that thread gives back. So of both the least of five steps and of all ranks is shown. Weak references say
whether a gathered buffer of packed weights really outlives the forward pass; then there is an error. `gather` is the
largest module's packed bytes, `matrix` the largest matrix that is dequantised, in the dtype of training.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.launch import run, write_figures
from tests.support.packed_training import (
    count_alive,
    inputs,
    load,
    one_module_at_a_time,
    watched_memory,
    with_adapters,
)
from tests.support.quantised_checkpoints import compressed_tensors, fp8, mxfp4, unquantised


Figures = dict[str, Any]

STEPS = 5
"""How many forward passes are looked at."""

MAKERS: dict[str, Callable[[Path], Any]] = {
    "block FP8, mixture": lambda folder: fp8(folder, width=1024),
    "MXFP4, mixture": lambda folder: mxfp4(folder, width=1024),
    "int4 by group, mixture": lambda folder: compressed_tensors(folder, "int4 by group", width=1024),
    "double NF4 while loading, dense": lambda folder: unquantised(folder, width=1024),
    "LLM.int8() while loading, dense": lambda folder: unquantised(folder, width=1024),
}


def _arguments(name: str) -> dict[str, Any]:
    from transformers import BitsAndBytesConfig

    if "NF4" in name:
        nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        return {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **nf4)}
    return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)} if "int8()" in name else {}


def measure(name: str, folder: str) -> Figures:
    """Load with all ranks, train six steps, and look at the forward passes but the first; this rank's figures."""
    import deepspeed

    from hf_zero_stream.holdings.introspection import packed_weights

    deepspeed.init_distributed("gloo")
    config = one_module_at_a_time()
    base = load(Path(folder), config, **_arguments(name))
    reads = [rank["bytes_read"] for rank in base.streaming_report.to_dict()["ranks"]]
    frozen: list[Any] = list(base.parameters())
    weights = {module: list(packed_weights(module).values()) for module in base.modules()}
    matrices = [prod(weight.shape[-2:]) for of_module in weights.values() for weight in of_module]
    figures = {
        "whole": sum(param.ds_numel * param.ds_tensor.itemsize for param in frozen),
        "resident": sum(param.ds_tensor.nbytes for param in frozen),
        "read": reads[dist.get_rank()],
        "gather": max(sum(weight.row_bytes * len(weight.rows) for weight in each) for each in weights.values()),
        "matrix": 2 * max(matrices),
    }
    model = with_adapters(base)
    trainable = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=trainable)
    kept, peaks = [], []
    for _ in range(1 + STEPS):  # DeepSpeed knows the order of modules in the second step
        profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        with watched_memory() as seen, profiler:
            loss = engine(**inputs()).loss
        if alive := count_alive(seen["gathered"]):
            raise RuntimeError(f"{alive} gathered buffers are still alive after the forward pass")
        engine.backward(loss)
        engine.step()
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        sums = list(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
        kept.append(sums[-1])
        peaks.append(max(sums))
    dist.destroy_process_group()
    return figures | {"kept": min(kept[1:]), "peak": min(peaks[1:])}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure the memory of packed models under ZeRO-3.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every rank's figures")
    settings = parser.parse_args(arguments)
    print("MiB of one rank\n")
    print("| format | file | resident | of file / ranks | reads | gather | matrix | kept | peak |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    found = {}
    for name, make in MAKERS.items():
        with tempfile.TemporaryDirectory(prefix="packed-") as folder:
            make(Path(folder))
            in_file = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
            ranks = found[name] = run(json.dumps([name, folder]), settings.ranks, 600, module="benchmarks.packed")
        least = ("kept", "peak")
        most = {key: (min if key in least else max)(rank[key] for rank in ranks) for key in ranks[0]}
        # What is quantised while loading would be saved in a file of these bytes.
        whole = most["whole"] if "while loading" in name else in_file
        cells = [f"{most[key] / 2**20:.1f}" for key in ("read", "gather", "matrix", "kept", "peak")]
        ratio = most["resident"] * settings.ranks / whole
        print(
            f"| {name} | {in_file / 2**20:.1f} | {most['resident'] / 2**20:.1f} | {ratio:.3f} | {' | '.join(cells)} |",
            flush=True,
        )
    if settings.json:
        settings.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("["):
        torch.set_num_threads(1)
        write_figures(sys.argv[2], measure(*json.loads(sys.argv[1])))
    else:
        sys.exit(main())
