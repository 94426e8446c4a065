"""Ranks at different passes, or at a pass and a save, get one error that says where each is, and none waits on."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

import hf_zero_stream
from hf_zero_stream.errors import HfZeroStreamError
from hf_zero_stream.ranks import watchdog
from tests.support.cluster import run_ranks
from tests.support.loading import load_with
from tests.support.parity import ds_config
from tests.support.streams import taken
from tests.support.zoo import Checkpoint


ACTOR, CRITIC = "weight stream 1 of LlamaForCausalLM to rank0", "weight stream 2 of LlamaForCausalLM to all"


def go_apart(checkpoint: Path, folder: Path, ways: list[str]) -> tuple[str, float, list[int]]:
    """The error of this rank at its own one of `ways`, after how long, and how complete passes of all ranks are then.

    Rank 0 is in the middle of a pass by then if its way says so, and so is any other rank, which leaves it open.
    """
    watchdog.STUCK_S = 1.0
    model = load_with("streamed", "AutoModelForCausalLM", checkpoint, ds_config(), {})
    actor = hf_zero_stream.weight_stream(model, bucket_bytes=2000, deltas=True)
    critic = hf_zero_stream.weight_stream(model, "all")
    taken(actor)
    held = iter(actor)
    if ways[0] == "goes on":
        next(held)
    does: dict[str, Callable[[], object]] = {
        "goes on": lambda: list(held),
        "actor": lambda: list(actor),
        "changes": lambda: list(actor.deltas()),
        "critic": lambda: list(critic),
        "save": lambda: hf_zero_stream.save_pretrained(model, folder / "saved"),
        "another": lambda: hf_zero_stream.weight_stream(model),
    }
    start, message = time.perf_counter(), ""
    try:
        does[ways[dist.get_rank()]]()
    except HfZeroStreamError as error:
        message = f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - start
    return message, seconds, [len(taken(stream)) - len(stream.metadata) for stream in (actor, critic)]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("ways", "places"),
    [
        (["actor", "critic"], [f"a pass of {ACTOR}", f"a pass of {CRITIC}"]),
        (["changes", "actor"], [f"the changes of {ACTOR}", f"a pass of {ACTOR}"]),
        (["another", "critic"], ["a new weight stream", f"a pass of {CRITIC}"]),
        (["goes on", "critic"], [f"has begun to stream weights (a pass of {ACTOR})", f"(a pass of {CRITIC})"]),
        (["goes on", "save"], [f"has begun to stream weights (a pass of {ACTOR})", "waits for all ranks to save"]),
        (
            ["save", "critic"],
            ["waits for all ranks to save", f"waits for all ranks to stream weights (a pass of {CRITIC})"],
        ),
        (
            ["goes on", "critic", "critic"],
            [f"has begun to stream weights (a pass of {ACTOR})", f"(a pass of {CRITIC})"],
        ),
    ],
    ids=lambda value: "-".join(value) if len(value[0]) < 10 else "",
)
def test_each_rank_at_its_own(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, ways: list[str], places: list[str]
) -> None:
    found = run_ranks(len(ways), go_apart, zoo_checkpoint("llama"), tmp_path, ways, timeout=60)
    for rank, (message, seconds, lacking) in enumerate(found):
        assert all(place in message for place in places), (rank, message)
        assert seconds < 15
        assert lacking[1] == 0 and (rank or lacking[0] == 0)
