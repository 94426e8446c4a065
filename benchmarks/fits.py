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
from hf_zero_stream.cli.needs import is_tight, needs_of_node, phases_of
from hf_zero_stream.plugins.demo.suggest import OFFLOADS, ds_config_of


GIB = 2**30
CARDS = {"80 GB": 79, "141 GB": 140}
"""GiB that nvidia-smi shows of an H100 (81559 MiB) and of an H200 (143771 MiB), whole ones."""

COMMON_HOST = 2000
"""GiB that hosts commonly have."""

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
                config = ds_config_of(on_host, "bf16")
                row = planned(place, gpus, trains, "ZeRO-3", on_host, lora=lora, ds_config=config)
                yield row
                if row.fits("80 GB"):
                    break
            sharding = {"distributed_config": {"fsdp_size": gpus}, "dtype": "bfloat16"}
            yield planned(place, gpus, trains, "FSDP2", "nothing", lora=lora, **sharding)


def planned(place: str, gpus: int, trains: str, engine: str, on_host: str, **how: Any) -> Row:
    import hf_zero_stream

    memory = hf_zero_stream.plan(place, world_size=gpus, device="cuda", **how).memory
    load, start, *step = (phase.get("cuda", 0) for phase in phases_of(memory, "cuda"))
    host = needs_of_node(memory, "cuda", min(gpus, GPUS_PER_NODE))["host"]
    return Row(gpus, trains, engine, on_host, load, start, max(step), host)


OFFLOADED = dict(zip(OFFLOADS, ("", ", optimizer offloaded", ", all offloaded"), strict=True))


def left_of(size: int, peak: int, host: int) -> str:
    """What a GPU of `size` has left for activations, or that it is too small; all in GiB."""
    if peak > size:
        return "no"
    tight = ", tight" if is_tight(peak, size) else ""
    return f"{size - peak}{tight}{f', if a host has {host}' if host > COMMON_HOST else ''}"


def section(model: str, found: list[Row]) -> str:
    """Of the page."""
    lines = [
        f"## {model}",
        "",
        "| GPUs | trains | with | a GPU | a host | left of 80 GB | left of 141 GB |",
        "|--:|---|---|--:|--:|---|---|",
    ]
    for row in found:
        engine = row.engine + OFFLOADED[row.on_host]
        peak, host = (round(size / GIB) for size in (row.peak, row.host))
        left = " | ".join(left_of(size, peak, host) for size in CARDS.values())
        lines.append(f"| {row.gpus} | {row.trains} | {engine} | {peak} | {host} | {left} |")
    command = f"hf-zero-stream plan {model} --world-size {GPUS[-1]} --device-memory 79GiB --suggest --write zero3.yaml"
    return "\n".join([*lines, "", "```", command, "```", ""])


HEAD = f"""\
# What fits

Memory of training published models in bf16, in GiB, computed from headers of their true size before anything is
loaded. Activations are not counted: leave room for them. Nothing here was run on GPUs.

- *A GPU* is what each needs at its peak, of the load, `deepspeed.initialize` and a step. *A host* is what a node with
  {GPUS_PER_NODE} GPUs needs.
- *All* trains all parameters with AdamW. *LoRA* trains adapters of rank {LORA["r"]} (PEFT's `all-linear`); on a model
  that `distributed_config` has sharded, these are whole on every rank.
- ZeRO-3 has DeepSpeed's own defaults, and keeps fp32 copies. FSDP2, by `distributed_config`, trains in bf16 alone, as
  transformers does. Rows with offload are there where 80 GB are too small without it.
- The last two columns are what is left for activations: a GPU of 80 GB has {CARDS["80 GB"]} GiB, one of 141 GB
  {CARDS["141 GB"]}. *Tight* is less than a fifth; *no* is too small. Hosts with more than {COMMON_HOST} GiB are rare.

`python -m benchmarks.fits` writes this page. Checkpoints that are published in FP8 or MXFP4 are counted in bf16. For
your own model, `hf-zero-stream plan` computes the same ([command line](cli.md#plan)).

"""


def main() -> None:
    from benchmarks.sparse_checkpoint import make_sparse_checkpoint

    parser = argparse.ArgumentParser(description="Plan published models on GPUs, and write the page.")
    parser.add_argument("--models", default=",".join(MODELS), help="of these, separated by commas")
    parser.add_argument("--output", type=Path, default=Path("docs/fits.md"))
    settings = parser.parse_args()
    sections = []
    for model in settings.models.split(","):
        folder = make_sparse_checkpoint(CACHE / f"{model.rpartition('/')[2].lower()}-bf16", MODELS[model]())
        sections.append(section(model, list(rows(str(folder)))))
        print(sections[-1], flush=True)
    settings.output.write_text(HEAD + "\n".join(sections), encoding="utf-8")


if __name__ == "__main__":
    main()
