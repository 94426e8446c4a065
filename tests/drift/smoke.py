"""What a user does first, in each home: load, train, save, resume; and types of models, compared with plain loads.

Each line that it prints is one thing that was tried, and what came of it.
"""

import inspect
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import accelerate.utils
import pytest
import torch
import torch.distributed as dist
import transformers
import transformers.distributed

import hf_zero_stream
from hf_zero_stream.holdings.introspection import is_streamed
from tests.support.changed_models import SHARDED_BY, Session, resume_changed
from tests.support.checkpoint_files import differing
from tests.support.cluster import RankFailure, run_ranks
from tests.support.parity import whole_values
from tests.support.sharded import even_model
from tests.sweep.destinations import Destination
from tests.sweep.run import sweep
from tests.sweep.tables import Table, table
from tests.sweep.tiny import all_types


HOMES = {
    "ZeRO-3": ("zero3", "engine"),
    "offloaded ZeRO-3": ("zero3-offloaded", "engine"),
    "ZeRO-2": ("zero2", "engine"),
    "ZeRO-1": ("zero1", "engine"),
    "FSDP2 by accelerate": ("fsdp2", "accelerate"),
    "FSDP2": ("distributed_config", "save_state"),
    "TP": ("tp", "save_state"),
    "EP": ("ep", "save_state"),
    "replicas": ("replicas", "save_state"),
    "device_map": ("device_map", "save_state"),
}
"""Where a model is loaded to and trained, and what saves its training state: see `tests.support.changed_models`."""

ELSEWHERE = ["FSDP2 by accelerate", "FSDP2", "ZeRO-1"]
"""Homes in which a training goes on that ZeRO-3 began, at another number of ranks."""

ON_TWO_RANKS = ("TP", "EP")
"""Homes whose plans do not divide the model by three."""

SAMPLE = (
    "qwen3_moe mixtral deepseek_v2 nomic_bert molmo2 ernie4_5_vl_moe nemotron_h olmo_hybrid "  # with conversions
    "llama t5 clip wav2vec2"
)
"""Model types that each set of versions is tried with, if it has them."""


def is_there(home: str) -> bool:
    """Whether this version of accelerate, or of transformers, shards in this way at all."""
    if home == "fsdp2":
        return hasattr(accelerate.utils.fsdp_utils, "fsdp2_prepare_model")
    return (
        set(SHARDED_BY.get(home, ()))
        <= inspect.signature(transformers.distributed.DistributedConfig).parameters.keys()
    )


def make_checkpoint(folder: Path) -> Path:
    """A mixture of experts, whose fused weights transformers makes of several tensors of the checkpoint."""
    even_model("qwen3_moe").save_pretrained(folder)
    return folder


# ------------------------------------------------------------------------------------------------------------- homes


def train_and_save(folder: Path, target: Path, home: str, saver: str) -> tuple[str, list[float]]:
    """What is wrong after the load, or who made it; the losses after the save."""
    plain = whole_values(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(progress=False, share_reads=True)):
        session = Session(folder, home, saver, "none", seed=1)
        if wrong := differing(whole_values(session.model), plain):
            return f"wrong values: {', '.join(wrong[:4])}", []
        session.train((0, 1))
        session.save(target / "none")
        session.model.save_pretrained(target / "weights")
        values, losses = whole_values(session.model), session.train((2, 3))
    if dist.get_rank() == 0:
        torch.save(values, target / "none.pt")  # for resume_changed
    return "right" if is_streamed(session.model) else "right, by stock", losses


def wrongly_saved(target: Path) -> list[str]:
    """The parameters that a plain load of what was saved has otherwise than the model that was trained."""
    saved = transformers.AutoModelForCausalLM.from_pretrained(target / "weights", dtype=torch.float32)
    return differing(whole_values(saved), torch.load(target / "none.pt"))


def resumed(ranks: int, folder: Path, target: Path, home: str, saver: str, losses: list[float]) -> str:
    """What comes of a resume, in new processes, from what :func:`train_and_save` saved."""
    found = run_ranks(ranks, resume_changed, folder, target, home, saver, ["none"])[0]["none"]
    if found["wrong"]:
        return f"wrong values: {', '.join(found['wrong'][:4])}"
    # Other ranks, and other kinds of training, add up gradients in another order.
    return "right" if found["losses"] == pytest.approx(losses, rel=1e-4) else f"losses {found['losses']}, not {losses}"


def outcome(work: Callable[[], str]) -> str:
    try:
        return work()
    except RankFailure as failure:
        print(failure, file=sys.stderr)
        errors = [each for each in failure.outcomes if each.error_type is not None]
        error = min(errors, key=lambda each: each.error_type == "PeerError")  # which says that another rank has one
        return f"{error.error_type}: {' '.join(str(error.error_message).split())[:200]}"


def in_home(folder: Path, target: Path, name: str) -> str:
    """What comes of a load, a training and its saves on two ranks, and of resumes on two and on three."""
    home, saver = HOMES[name]
    target.mkdir()
    what, losses = run_ranks(2, train_and_save, folder, target, home, saver)[0]
    if not losses:
        return what
    if wrong := wrongly_saved(target):
        return f"wrong values are saved: {', '.join(wrong[:4])}"
    for ranks in (2,) if name in ON_TWO_RANKS else (2, 3):
        again = outcome(partial(resumed, ranks, folder, target, home, saver, losses))
        if again != "right":
            return f"resumed on {ranks} ranks: {again}"
    return what


def elsewhere(folder: Path, target: Path) -> Iterator[tuple[str, str]]:
    """What comes of a training that goes on in another home, on three ranks where there were two."""
    target.mkdir()
    _, losses = run_ranks(2, train_and_save, folder, target, "zero3", "save_state")[0]
    for name in ELSEWHERE:
        home, _ = HOMES[name]
        if is_there(home):
            work = partial(resumed, 3, folder, target, home, "save_state", losses)
            yield f"ZeRO-3 to {name}", outcome(work)


def homes(folder: Path, out: Path) -> Iterator[tuple[str, str]]:
    """Each home, and each way from one to another, and what came of it."""
    for name, (home, _) in HOMES.items():
        yield name, outcome(partial(in_home, folder, out / home, name)) if is_there(home) else "not in this version"
    yield from elsewhere(folder, out / "elsewhere")


# ------------------------------------------------------------------------------------------------------------- types


def types(known: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """Each model type of the sample, and each that the last sweep did not know, and how it compares."""
    there, of_last_sweep = set(all_types()), Table.parse(known.read_text()).rows
    names = [name for name in SAMPLE.split() if name in there]
    new = sorted(there - of_last_sweep.keys())
    destinations = [Destination("zero3x2"), *([Destination("fsdp2")] if is_there("distributed_config") else [])]
    found = sweep([*names, *new], folder, destinations=destinations, say=lambda line: print(line, file=sys.stderr))
    rows = Table.parse(table(found)).rows
    for name in [*names, *new]:
        if why := found.cannot_build.get(name):
            what = f"cannot be built: {' '.join(why.split())[:200]}"
        else:
            texts = {}
            for to in destinations:
                error = found.rows["ours", to.name, "fp32"][name].get("error", "")
                texts[to.name] = f"raises: {' '.join(error.split())[:160]}" if error else rows[name][f"{to.name} fp32"]
            what = "; ".join(f"{to} {text}" for to, text in texts.items() if text != "equal") or "equal"
        yield f"{name} (new)" if name in new else name, what


def main(known: Path) -> None:
    """`known`: the table of the last sweep."""
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        for name, what in homes(make_checkpoint(out / "checkpoint"), out):
            print(json.dumps({"home": name, "outcome": what}), flush=True)
        for name, what in types(known, out / "types"):
            print(json.dumps({"type": name, "outcome": what}), flush=True)
