"""An error that all ranks hear of keeps its cause and its context on the rank where it happened."""

import contextlib
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import transformers

import hf_zero_stream
from tests.support.cluster import run_ranks
from tests.support.disk import disk, failing
from tests.support.parity import ds_config
from tests.support.zoo import Checkpoint


Chain = tuple[str, Any, Any, bool]
"""The name of an error's class, the same of its cause and of its context, and whether a traceback leaves that out."""


def chain(error: BaseException | None) -> Chain | None:
    if error is None:
        return None
    return type(error).__name__, chain(error.__cause__), chain(error.__context__), error.__suppress_context__


class WithCause(transformers.LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        raise ValueError("no such activation") from KeyError("swoosh")


class WithContext(transformers.LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        try:
            raise KeyError("swoosh")
        except KeyError:
            raise ValueError("no such activation")  # noqa: B904 - so does much code


def caught(work: Callable[[], Any]) -> Chain | None:
    """What `work` raises; it is called as the second try after another error, as users do."""
    try:
        raise LookupError("the first try")
    except LookupError:
        try:
            work()
        except Exception as error:
            return chain(error)
    return None


def errors_of_all_calls(checkpoint: Path, folder: Path) -> dict[str, Chain | None]:
    config = ds_config()

    def load(model_class: Any = transformers.LlamaForCausalLM) -> Any:
        with hf_zero_stream.streaming():
            return model_class.from_pretrained(checkpoint, ds_config=config)

    model = load()
    found = {"cause": caught(lambda: load(WithCause)), "context": caught(lambda: load(WithContext))}
    fault = failing(errno.EIO)
    with disk(fault, fault) if dist.get_rank() == 1 else contextlib.nullcontext():
        found["read"] = caught(load)
        found["live read"] = caught(lambda: hf_zero_stream.load_into(model, str(checkpoint)))
        found["write"] = caught(lambda: hf_zero_stream.save_pretrained(model, folder))
    load()
    return found


def stock_errors(checkpoint: Path) -> dict[str, Chain | None]:
    return {
        "cause": caught(lambda: WithCause.from_pretrained(checkpoint)),
        "context": caught(lambda: WithContext.from_pretrained(checkpoint)),
    }


def test_causes_and_contexts_are_kept(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoint = zoo_checkpoint("llama")
    ranks = run_ranks(2, errors_of_all_calls, checkpoint, tmp_path / "saved")
    for name, expected in stock_errors(checkpoint).items():
        assert expected is not None
        assert [rank[name] for rank in ranks] == [expected] * 2
    for name, kind in (("read", "ReadError"), ("live read", "ReadError"), ("write", "SaveError")):
        assert [rank[name][0] for rank in ranks] == [kind] * 2
        assert ranks[1][name][1][0] == "OSError", ranks[1][name]
