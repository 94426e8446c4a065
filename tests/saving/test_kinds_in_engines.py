"""The tensors of test_kinds.py in DeepSpeed's engines: saved and resumed with stock's values, or refused by name.

What DeepSpeed does not train, or does not save or load itself, is compared with its error.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

import hf_zero_stream
from hf_zero_stream.errors import UnsupportedError
from tests.saving.test_kinds import KNOWN, UNKNOWN, Wrapping, odd, save
from tests.support.checkpoint_files import differing, tensors_of
from tests.support.cluster import run_ranks
from tests.support.parity import ds_config


SAVED, REFUSED, BY_DEEPSPEED, AS_STOCK = "saved", "refused", "by DeepSpeed", "fails, as stock does"

NO_ROWS = {2: {"expanded"}, 3: {"expanded", "uint16"}}
"""By stage. Of an expanded parameter, gloo puts what DeepSpeed broadcasts behind its memory: the process may abort. It
has no uint16, and ranks that come together to gather some do not come apart again in order."""

KINDS = list({**KNOWN, **UNKNOWN})
SAMPLE = ["complex64", "an expanded buffer", "a buffer that is a weight", "a sparse buffer"]


def engine_of(kind: str, stage: int, *, is_new: bool = False) -> Any:
    """An engine around a model with a tensor of this kind; of a new one, all values are zeros."""
    model = odd({**KNOWN, **UNKNOWN}[kind])
    for tensor in [*model.parameters(), *model.buffers()] if is_new else ():
        with suppress(RuntimeError, ValueError), torch.no_grad():  # there are kinds that nobody can change
            tensor.zero_()
    trained = [param for param in model.parameters() if param.requires_grad]
    config = {**ds_config(torch.float32), "zero_optimization": {"stage": stage}}
    return deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]


def values_of(engine: Any) -> dict[str, torch.Tensor]:
    """The whole state dict, as DeepSpeed gathers it; an error is one of all ranks."""
    shared = [param for param in engine.module.parameters() if hasattr(param, "ds_id")]
    with deepspeed.zero.GatheredParameters(shared, enabled=bool(shared)):
        return {name: value.detach().clone() for name, value in engine.module.state_dict().items()}


def dense(value: torch.Tensor) -> torch.Tensor:
    return value.inner if isinstance(value, Wrapping) else value.to_dense() if value.is_sparse else value


def is_same(engine: Any, other: Any) -> bool:
    mine, theirs = values_of(engine), values_of(other)
    return mine.keys() == theirs.keys() and all(torch.equal(dense(mine[name]), dense(theirs[name])) for name in mine)


def resumed_by_stock(engine: Any, kind: str, stage: int, folder: Path) -> str:
    """The error of DeepSpeed's own checkpoints, if there is one."""
    try:
        engine.save_checkpoint(folder)
        other = engine_of(kind, stage, is_new=True)
        other.load_checkpoint(folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "" if is_same(engine, other) else "other values"


def saved(engine: Any, values: dict[str, torch.Tensor], folder: Path) -> str:
    """The outcome of a save of weights, beside that of stock, which has gathered the `values`."""
    stock, failed = folder.with_name("stock"), None
    try:
        if dist.get_rank() == 0:
            engine.module.save_pretrained(stock, state_dict=values)
    except Exception as error:
        failed = error
    try:
        found = save(engine, folder)
    except UnsupportedError:
        return refused(folder)
    assert failed is None, failed
    if dist.get_rank() == 0:
        assert differing(found, tensors_of(stock)) == []
    return SAVED


def resumed(engine: Any, kind: str, stage: int, folder: Path, *, by_engine: bool, stock_fails: str) -> str:
    """The outcome of a state of ours, or of DeepSpeed's own call inside `streaming()`."""
    try:
        if by_engine:
            with hf_zero_stream.streaming():
                engine.save_checkpoint(folder)
        else:
            hf_zero_stream.save_state(engine, folder)
        is_ours = any(folder.rglob("training_state.json"))
        other = engine_of(kind, stage, is_new=True)
        if by_engine:
            with hf_zero_stream.streaming():
                other.load_checkpoint(folder)
        else:
            hf_zero_stream.load_state(other, folder)
    except UnsupportedError:
        assert not by_engine
        return refused(folder)
    except Exception as error:
        assert stock_fails == f"{type(error).__name__}: {error}"
        return AS_STOCK
    assert is_same(engine, other)
    return SAVED if is_ours else BY_DEEPSPEED


def refused(folder: Path) -> str:
    dist.barrier()  # rank 0 has removed its draft then
    assert not [path for path in folder.rglob("*") if path.is_file()]
    return REFUSED


def outcome(kind: str, stage: int, folder: Path) -> list[str]:
    try:
        engine = engine_of(kind, stage)
        values = values_of(engine)
    except Exception:
        return []  # DeepSpeed does not train it
    found = [saved(engine, values, folder / "weights")]
    stock_fails = resumed_by_stock(engine, kind, stage, folder / "by stock")
    for by_engine in (False, True):
        place = folder / f"resumed {by_engine}"
        found.append(resumed(engine, kind, stage, place, by_engine=by_engine, stock_fails=stock_fails))
        dist.barrier()
    return found


def outcomes(kinds: Sequence[str], stage: int, folder: Path) -> dict[str, list[str]]:
    found = {}
    for number, kind in enumerate(kind for kind in kinds if kind not in NO_ROWS[stage]):
        try:
            found[kind] = outcome(kind, stage, folder / str(number))
        except Exception as error:
            raise AssertionError(kind) from error
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("kinds", [SAMPLE, pytest.param(KINDS, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("stage", [2, 3])
def test_in_engines(cluster: None, tmp_path: Path, stage: int, kinds: list[str]) -> None:
    first, second = run_ranks(2, outcomes, kinds, stage, tmp_path, timeout=120)
    assert first == second
    for kind, found in first.items():
        if found and kind in KNOWN and not (kind == "complex64" and stage == 2):  # all parameters become complex
            assert found[0] == SAVED and {*found[1:]} in ({SAVED}, {AS_STOCK}), (kind, found)
        elif found:
            assert REFUSED not in found[:2] or found[:2] == [REFUSED, REFUSED], (kind, found)
    assert {kind: first[kind] for kind in kinds if kind in SAMPLE} == {
        "complex64": [REFUSED, REFUSED, BY_DEEPSPEED] if stage == 2 else [],
        "an expanded buffer": [SAVED, SAVED, SAVED],
        "a buffer that is a weight": [REFUSED, REFUSED, BY_DEEPSPEED],
        "a sparse buffer": [REFUSED, REFUSED, BY_DEEPSPEED],
    }
