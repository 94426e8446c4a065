"""Ranks that share the reading of whole models: the next piece is read while the one before is exchanged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_zero_stream
from hf_zero_stream.engine import reader as reading
from hf_zero_stream.ranks import coordinator
from tests.support.cluster import run_ranks
from tests.support.parity import unequal
from tests.support.sharded import even_model


def steps_of_a_load(folder: Path) -> tuple[list[str], list[str]]:
    """In which order a rank reads, begins exchanges and ends them; and what differs from a plain load."""
    seen: list[str] = []
    read, begin = reading.execute_reads, coordinator.Coordinator.begin

    def noted_read(plan: Any, *args: Any, **others: Any) -> Any:
        if plan.reads:
            seen.append("read")
        return read(plan, *args, **others)

    def noted_begin(self: Any, collective: Any, *args: Any, **others: Any) -> Callable[[], None]:
        wait = begin(self, collective, *args, **others)
        if args[0].numel() < 2**12:  # an agreement
            return wait
        seen.append("begin")
        return lambda: (seen.append("end"), wait())[1]

    reading.execute_reads, coordinator.Coordinator.begin = noted_read, noted_begin  # type: ignore[assignment, method-assign]
    with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(staging_bytes=2**14, progress=False)):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    coordinator.Coordinator.begin, reading.execute_reads = begin, read  # type: ignore[method-assign]
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return seen, unequal(model, plain)


def test_a_piece_is_read_while_the_one_before_is_exchanged(cluster: None, tmp_path: Path) -> None:
    even_model("llama").save_pretrained(tmp_path)
    for seen, different in run_ranks(2, steps_of_a_load, tmp_path):
        assert different == []
        exchanges = seen.count("begin")
        assert exchanges > 2 and seen.count("end") == exchanges
        order = "".join(step[0] for step in seen)
        assert order.endswith("e") and "brebre" in order, order
