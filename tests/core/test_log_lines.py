"""What ranks say in one log file: each thing once, or once per host, and no name of a temporary file."""

import logging
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers

import hf_zero_stream
from hf_zero_stream.settings import config
from tests.support.cluster import run_ranks
from tests.support.parity import ds_config
from tests.support.zoo import Checkpoint


WORLD_SIZE, ON_A_HOST = 4, 2

Line = tuple[str, str]


def act(folder: Path, saved: Path) -> tuple[list[Line], list[Line]]:
    """Load, save and resume; returns (our lines, transformers' lines), each with its logger."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank() % ON_A_HOST)
    transformers.utils.logging.set_verbosity_info()
    for name in ("hf_zero_stream", "transformers"):
        logging.getLogger(name).setLevel(logging.INFO)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    for name in ("hf_zero_stream", "transformers"):
        logging.getLogger(name).addHandler(handler)
    os.environ["HF_ZERO_STREAM_VERFIY"] = "full"
    with hf_zero_stream.streaming():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, ds_config=ds_config())
        model.save_pretrained(saved / "model")
        engine = deepspeed.initialize(model=model, config=ds_config())[0]
        ids = torch.arange(8)[None]
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        engine.save_checkpoint(saved / "state")
        engine.load_checkpoint(saved / "state")
        dist.barrier()  # so that the two that come next wait at the same time
        with hf_zero_stream.streaming():
            if dist.get_rank() % 2:  # it is not shared, and each rank that comes knows that
                transformers.AutoModel.from_pretrained(folder, ds_config={"zero_optimization": {"stage": 0}})
        dist.barrier()  # rank 0 keeps the store, through which they agree who speaks
    lines = [(record.name, record.getMessage()) for record in records]
    return tuple([line for line in lines if line[0].startswith(whose)] for whose in ("hf_zero_stream", "transformers"))


@pytest.mark.slow
def test_ranks_speak_once(compiler: None, cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    found = run_ranks(WORLD_SIZE, act, zoo_checkpoint("llama"), tmp_path, timeout=240)
    ranks_of = defaultdict[str, list[int]](list)
    for rank, (ours, others) in enumerate(found):
        for _, text in ours:
            ranks_of[text].append(rank)
        assert not [text for _, text in (*ours, *others) if "saving-" in text or "saved in" in text]
    spoken = {text: ranks for text, ranks in ranks_of.items()}
    assert sum("STREAMING LOAD REPORT" in text for text in spoken) >= 1, spoken
    assert sum(text.startswith("loaded ") for text in spoken) == 1, spoken
    assert sum(": resumed " in text for text in spoken) == 1, spoken
    assert sum(text.startswith("saved ") for text in spoken) == 2, spoken
    assert sum("do not share the reading" in text for text in spoken) == 1, spoken
    for text, ranks in spoken.items():
        if "HF_ZERO_STREAM_VERFIY" in text:
            assert ranks == [0, ON_A_HOST], (text, ranks)
        else:
            assert len(ranks) == 1, (text, ranks)


def call_outside_of_streaming(folder: Path, saved: Path) -> dict[str, int]:
    """How often this rank warns of a variable that is no setting, in each call that needs no ``streaming()``."""
    os.environ["HF_ZERO_STREAM_VERFIY"] = "full"
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("hf_zero_stream").addHandler(handler)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    calls: dict[str, Callable[[], object]] = {
        "save_pretrained": lambda: hf_zero_stream.save_pretrained(model, saved / "model"),
        "load_into": lambda: hf_zero_stream.load_into(model, str(saved / "model")),
        "save_state": lambda: hf_zero_stream.save_state(model, saved / "state", optimizer=optimizer),
        "load_state": lambda: hf_zero_stream.load_state(model, saved / "state", optimizer=optimizer),
    }
    found = {}
    for name, call in calls.items():
        config._warn_of_variable.cache_clear()  # as if it were the first call of the process
        records.clear()
        call()
        call()
        found[name] = sum("HF_ZERO_STREAM_VERFIY" in record.getMessage() for record in records)
    return found


def test_mistyped_variables_are_named_outside_of_streaming_too(
    compiler: None, cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    first, second = run_ranks(2, call_outside_of_streaming, zoo_checkpoint("llama"), tmp_path)
    assert set(first.values()) == {1}, first
    assert set(second.values()) == {0}, second
