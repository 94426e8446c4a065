"""Weights that stay quantised, on paper GPUs under NCCL: loaded, saved, resumed, and loaded into a plain model."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.paper_gpu.packed_trials import packed_resumed, packed_states
from tests.paper_gpu.trials import in_one_process, outcome
from tests.support.cluster import PAPER_GPUS, run_ranks
from tests.support.packed_training import check_saved
from tests.support.quantised_checkpoints import bitsandbytes, dense_fp8, mxfp4


pytestmark = [pytest.mark.usefixtures("paper_gpus"), pytest.mark.plugin("packed")]

MAKERS: dict[str, Callable[[Path], Any]] = {
    "FP8": dense_fp8,
    "MXFP4": mxfp4,
    "NF4": lambda folder: bitsandbytes(folder, "double nf4", width=64, dequantised=folder / "plain"),
}
TITLES = [
    ("ZeRO-3 FP8",),
    pytest.param(("FSDP2 MXFP4",), marks=pytest.mark.slow),
    pytest.param(("FSDP2 FP8", "ZeRO-3 MXFP4"), marks=pytest.mark.slow),
    pytest.param(("ZeRO-3 NF4", "FSDP2 NF4"), marks=pytest.mark.slow),
]
RESUMED = ("ZeRO-3 FP8", "FSDP2 MXFP4", "ZeRO-3 NF4", "FSDP2 NF4")
"""Which states are loaded again by four ranks."""


@pytest.mark.slow
@pytest.mark.parametrize("titles", TITLES, ids=" and ".join)
def test_packed(tmp_path: Path, titles: tuple[str, ...]) -> None:
    """The values and losses of the same weights dequantised; in files, the bytes that they came from."""
    states = {}
    for title in titles:
        home, name = title.split()
        folder = tmp_path / name
        if not folder.exists():
            folder.mkdir()
            MAKERS[name](folder)
        # transformers dequantises no NF4 while it loads.
        states[title] = partial(packed_states, home, folder, tmp_path / title, loads_into=name != "NF4")
    resumed = {title: partial(packed_resumed, *states[title].args) for title in titles if title in RESUMED}
    at_two = run_ranks(2, in_one_process, states, on=replace(PAPER_GPUS, sets_device=True), timeout=280)
    for title in states:
        for rank in outcome(at_two, title):
            assert rank["packed"] and rank["differences"] == rank["loaded into"] == [], title
            assert rank["losses"] == rank["dequantised"] and len(set(rank["losses"])) == 3, title
            assert rank["again"] == rank["going on"] and len(set(rank["again"])) == 2, title
        check_saved(tmp_path / title / "weights", tmp_path / title.split()[-1])
    at_four = run_ranks(4, in_one_process, resumed, on=PAPER_GPUS, timeout=280) if resumed else []
    for title in resumed:
        expected = outcome(at_two, title)[0]["going on"]
        for losses in outcome(at_four, title):
            assert losses == pytest.approx(expected, rel=1e-2), title
