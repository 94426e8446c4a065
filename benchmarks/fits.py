"""What published models need on how many GPUs, planned from headers of their true size: writes docs/fits.md.

    python -m benchmarks.fits

Checkpoints have the shapes of the published ones, in bf16, and holes in place of the values (see
:mod:`benchmarks.sparse_checkpoint`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.scale import CACHE, deepseek_v3, kimi_k2, qwen3_30b_a3b, qwen3_235b_a22b
from hf_zero_stream.plugins.forecast.needs import is_tight, needs_of_node, phases_of
from hf_zero_stream.plugins.forecast.suggest import OFFLOADS, ds_config_of


GIB = 2**30
CARDS = {"80 GB": 79, "141 GB": 140}
"""GiB that nvidia-smi shows of an H100 (81559 MiB) and of an H200 (143771 MiB), whole ones."""

MUCH, COMMON_HOST = 500, 2000
"""GiB of a host that are worth a word; that hosts commonly have."""

GPUS = (8, 16, 64)
GPUS_PER_NODE = 8
LORA = {"r": 16, "target_modules": "all-linear"}


def llama_3_3_70b() -> Any:
    """Source: config.json of meta-llama/Llama-3.3-70B-Instruct."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )


def gpt_oss_120b() -> Any:
    """The defaults of transformers' config class are those of openai/gpt-oss-120b, but for the layers."""
    from transformers import GptOssConfig

    return GptOssConfig(num_hidden_layers=36, num_local_experts=128)


MODELS: dict[str, Callable[[], Any]] = {
    "Qwen/Qwen3-30B-A3B": qwen3_30b_a3b,
    "meta-llama/Llama-3.3-70B-Instruct": llama_3_3_70b,
    "openai/gpt-oss-120b": gpt_oss_120b,
    "Qwen/Qwen3-235B-A22B": qwen3_235b_a22b,
    "deepseek-ai/DeepSeek-V3": deepseek_v3,
    "moonshotai/Kimi-K2-Instruct": kimi_k2,
}


class Row(NamedTuple):
    """A set-up, and the bytes that it needs: of a device in each phase, and of a node's host."""

    gpus: int
    trains: str
    engine: str
    on_host: str
    load: int
    start: int
    step: int
    host: int

    @property
    def peak(self) -> int:
        return max(self.load, self.start, self.step)

    def fits(self, card: str) -> bool:
        return self.peak <= CARDS[card] * GIB


def rows(place: str) -> Iterator[Row]:
    """What training the checkpoint in `place` needs; with offload only where the smaller card is too small without."""
    for gpus in GPUS:
        for trains, lora in (("all", None), ("LoRA", LORA)):
            for on_host in OFFLOADS:
                config = ds_config_of(3, on_host, "bf16")
                row = planned(place, gpus, trains, "ZeRO-3", on_host, lora=lora, ds_config=config)
                yield row
                if row.fits("80 GB"):
                    break
            sharding = {"distributed_config": {"fsdp_size": gpus}, "dtype": "bfloat16"}
            yield planned(place, gpus, trains, "FSDP2", "nothing", lora=lora, **sharding)


def planned(place: str, gpus: int, trains: str, engine: str, on_host: str, **how: Any) -> Row:
    import hf_zero_stream

    memory = hf_zero_stream.plan(place, world_size=gpus, device="cuda", **how).memory
    load, start, *step = (phase.get("cuda", 0) for phase in phases_of(memory))
    host = needs_of_node(memory, "cuda", min(gpus, GPUS_PER_NODE))["host"]
    return Row(gpus, trains, engine, on_host, load, start, max(step), host)


OFFLOADED = dict(zip(OFFLOADS, ("", ", optimizer offloaded", ", all offloaded"), strict=True))


def need(peak: int, host: int) -> str:
    """What a GPU needs, and on which card that fits; what a host does, if that is much. All in GiB."""
    card = next((card for card, size in CARDS.items() if peak <= size), None)
    notes = [] if card == next(iter(CARDS)) else ["no" if card is None else card]
    notes += ["tight"] * (card is not None and is_tight(peak, CARDS[card]))
    if host > MUCH:
        notes.append(f"if a host has {host}" if host > COMMON_HOST else f"host {host}")
    return f"{peak} ({', '.join(notes)})" if notes else str(peak)


def section(model: str, found: list[Row]) -> str:
    """Of the page."""
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for row in found:
        place = cells.setdefault((row.trains, row.engine + OFFLOADED[row.on_host]), {})
        place[row.gpus] = need(round(row.peak / GIB), round(row.host / GIB))
    heads = ["trains", "with", *(f"{gpus} GPUs" for gpus in GPUS)]
    rows = [[*what, *(of.get(gpus, "") for gpus in GPUS)] for what, of in cells.items()]
    lines = [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]
    return "\n".join([f"## {model}", "", *lines, ""])


ATTENTION = {"r": 16, "target_modules": ["q_proj", "q_b_proj", "o_proj"]}
DISK_GBPS = 7
"""Gigabytes a second of one NVMe disk at PCIe 4."""

ONE_GPU = f"""\
## On one GPU, with frozen weights in files

GiB that one GPU and its host need to train adapters of attention with [frozen weights in files](from_files.md), under
ZeRO-3 on one rank, and what a step reads: at least so many seconds from a disk of {DISK_GBPS} GB/s. A GPU of 24 GB and
a host of 64 GB are enough for what needs less, activations not counted.

| | a GPU | its host | a step reads | seconds |
| --- | --: | --: | --: | --: |
"""


def on_one_gpu(model: str, place: str) -> str:
    """A row of that table."""
    import hf_zero_stream

    with hf_zero_stream.streaming(frozen_weights="files"):
        config = ds_config_of(3, "nothing", "bf16")
        memory = hf_zero_stream.plan(place, world_size=1, device="cuda", lora=ATTENTION, ds_config=config).memory
    device = max(phase.get("cuda", 0) for phase in phases_of(memory)) / GIB
    host = needs_of_node(memory, "cuda", 1)["host"] / GIB
    read = 2 * memory.partitions["files"]
    return f"| {model} | {device:.0f} | {host:.0f} | {read / 1e9:.0f} GB | {read / (DISK_GBPS * 1e9):.0f} |"


HEAD = f"""\
# What fits

GiB that a GPU needs at its peak (load, `deepspeed.initialize`, passes with all that may be gathered, or step) to train
published models in bf16, computed from headers of their true size. Activations are not counted: leave room for them.
Nothing here was run on GPUs.

- **A number alone** fits a GPU of 80 GB ({CARDS["80 GB"]} GiB). *141 GB*: only one of those ({CARDS["141 GB"]} GiB).
  *no*: neither. *tight*: less than a fifth is left for activations.
- **host**: GiB that a node with {GPUS_PER_NODE} GPUs needs, if more than {MUCH}. Hosts with more than {COMMON_HOST}
  are rare.
- *all* trains all parameters with AdamW. *LoRA* trains adapters of rank {LORA["r"]} (PEFT's `all-linear`); on a model
  that `distributed_config` has sharded, these are whole on every rank.
- *ZeRO-3* has DeepSpeed's own defaults, and keeps fp32 copies; offload is shown where 80 GB are too small without.
  *FSDP2*, by `distributed_config`, trains in bf16 alone, as transformers does.

`python -m benchmarks.fits` writes this page. Checkpoints that are published in FP8 or MXFP4 are counted in bf16. For
your own model, and for the smallest set-up that fits ([command line](cli.md#plan)):

```
hf-zero-stream plan Qwen/Qwen3-30B-A3B --world-size 64 --device-memory 79GiB --suggest --write zero3.yaml
```

"""


def main() -> None:
    from benchmarks.sparse_checkpoint import make_sparse_checkpoint

    parser = argparse.ArgumentParser(description="Plan published models on GPUs, and write the page.")
    parser.add_argument("--models", default=",".join(MODELS), help="of these, separated by commas")
    parser.add_argument("--output", type=Path, default=Path("docs/fits.md"))
    settings = parser.parse_args()
    sections, lines = [], []
    for model in settings.models.split(","):
        folder = make_sparse_checkpoint(CACHE / f"{model.rpartition('/')[2].lower()}-bf16", MODELS[model]())
        sections.append(section(model, list(rows(str(folder)))))
        lines.append(on_one_gpu(model, str(folder)))
        print(sections[-1], lines[-1], sep="\n", flush=True)
    one_gpu = ONE_GPU + "\n".join(lines) + "\n"
    settings.output.write_text(HEAD + "\n".join([*sections, one_gpu]), encoding="utf-8")


if __name__ == "__main__":
    main()
