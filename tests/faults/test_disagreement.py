"""Ranks that load different things, that are slow, and errors that all ranks hear of.

- Ranks that are about to load different things find out before anything is read.
- A rank that is slow, for whatever reason, is waited for as long as its process is there.
- An error that all ranks hear of keeps its cause and its context on the rank where it happened.
"""

import contextlib
import ctypes
import errno
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

import hf_zero_stream
from hf_zero_stream import StreamingConfig
from hf_zero_stream.engine import sameness
from hf_zero_stream.ranks.presence import Presence
from hf_zero_stream.ranks.store import PREFIX
from tests.support.checkpoint_files import add_one
from tests.support.cluster import run_ranks
from tests.support.deaths import load, look_as_behind_firewalls, look_as_on_other_hosts
from tests.support.disk import disk, failing, replace_reads
from tests.support.hosts import move_to_host
from tests.support.messages import error_of, message_of
from tests.support.parity import ds_config
from tests.support.zoo import Checkpoint


Change = Callable[[dict[str, Any], Path], None]
"""Makes what rank 1 does, in `arguments`, or its own copy of the checkpoint, another."""


def other_config(arguments: dict[str, Any], folder: Path) -> None:
    arguments["rms_norm_eps"] = 0.5


def other_dtype(arguments: dict[str, Any], folder: Path) -> None:
    arguments["ds_config"]["bf16"]["enabled"] = True


def other_setting(arguments: dict[str, Any], folder: Path) -> None:
    arguments["ds_config"]["hf_zero_stream"] = {"verify": "full"}


def other_zero(arguments: dict[str, Any], folder: Path) -> None:
    arguments["ds_config"]["zero_optimization"]["offload_param"] = {"device": "cpu"}


def other_library(arguments: dict[str, Any], folder: Path) -> None:
    real = sameness._version
    sameness._version = lambda name: "4.0.0" if name == "transformers" else real(name)


def other_size(arguments: dict[str, Any], folder: Path) -> None:
    with first_shard(folder).open("ab") as file:
        file.write(b"0123")


def other_header(arguments: dict[str, Any], folder: Path) -> None:
    """Two tensors of one size change places: nothing but a look at the header tells."""
    shard = first_shard(folder)
    data = shard.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    sizes: dict[str, str] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        other = sizes.setdefault(str((entry["dtype"], entry["shape"])), name)
        if other != name:
            begin, end = entry["data_offsets"], header[other]["data_offsets"]
            entry["data_offsets"], header[other]["data_offsets"] = end, begin
            break
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    assert len(text) == length and text != data[8 : 8 + length]
    shard.write_bytes(data[:8] + text + data[8 + length :])


def first_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def disagree(folder: Path, own: Path, change: Change, on_another_host: bool) -> dict[str, Any]:
    """Load where rank 1 does something else; then load alike."""
    arguments: dict[str, Any] = {"ds_config": ds_config()}
    seen = folder
    if dist.get_rank() == 1:
        seen = shutil.copytree(folder, own / "copy")
        change(arguments, seen)
        if on_another_host:
            move_to_host("another")
    reads = []
    try:
        with disk(lambda real, *args: reads.append(1) or real(*args)):
            hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(seen, **arguments)
    except Exception as error:
        caught = (type(error).__name__, str(error))
    else:
        raise AssertionError("different things were loaded")
    if change is other_library:
        from hf_zero_stream.engine import sameness

        sameness._version = lambda name: "the same"
    model = hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(folder, ds_config=ds_config())
    return {"caught": caught, "reads": len(reads), "loaded": len(model.streaming_report.ranks)}


@pytest.mark.parametrize(
    ("change", "kind", "texts"),
    [
        (
            other_config,
            "DisagreementError",
            ["rank 1", "the model's config (rms_norm_eps: 0.5 there, 1e-06 on rank 0)"],
        ),
        (
            other_dtype,
            "DisagreementError",
            ["the parameters' dtypes (model.embed_tokens.weight: bfloat16 there, float32 on rank 0; ", " more)"],
        ),
        (other_setting, "DisagreementError", ["rank 1", "the setting verify (full there, sizes on rank 0)"]),
        (
            other_zero,
            "DisagreementError",
            [
                "rank 1",
                'the DeepSpeed config (zero_optimization.offload_param.device: "cpu" there, nothing on rank 0)',
            ],
        ),
        (other_library, "DisagreementError", ["rank 1", "the version of transformers (4.0.0 there"]),
        (
            other_size,
            "CheckpointError",
            ["/copy/", "where rank 0 sees", "(rank 0 loads ", "Give all ranks the same folder", "different things"],
        ),
        (other_header, "CheckpointError", ["another header than rank 0's", "Make the checkpoint the same on every"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_before_anything_is_read(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, change: Change, kind: str, texts: list[str]
) -> None:
    results = run_ranks(3, disagree, zoo_checkpoint("qwen3_moe"), tmp_path, change, change is other_header, timeout=60)
    for result in results:
        assert result["caught"][0] == kind, result["caught"]
        for text in texts:
            assert text in result["caught"][1], result["caught"]
        assert result["reads"] == 0 and result["loaded"] == 3


def share_in_other_chunks(folder: Path) -> tuple[str, str]:
    """Where ranks exchange what they read, they must cut it in the same way."""
    settings = hf_zero_stream.StreamingConfig(share_reads=True, staging_bytes=2**20 * (1 + dist.get_rank()))
    with hf_zero_stream.streaming(settings):
        return error_of(lambda: transformers.AutoModelForCausalLM.from_pretrained(folder))


def test_staging_bytes_where_ranks_share_reads(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    for kind, message in run_ranks(2, share_in_other_chunks, zoo_checkpoint("llama")):
        assert (
            kind == "DisagreementError" and "the setting staging_bytes (2097152 there, 1048576 on rank 0)" in message
        )


def read_from_one_rank(folder: Path) -> dict[str, Any]:
    """Rank 1 alone has `read_from`, which decides what ranks say to each other from the start."""
    auto_class = hf_zero_stream.StreamingAutoModelForCausalLM
    read_from: Any = "rank0" if dist.get_rank() == 1 else "all"
    settings = StreamingConfig(read_from=read_from, share_reads=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    found: dict[str, Any] = {}

    def share_it() -> None:
        with hf_zero_stream.streaming(settings):
            transformers.AutoModelForCausalLM.from_pretrained(folder)

    def load_it(**kwargs: Any) -> None:
        with hf_zero_stream.streaming(settings):
            auto_class.from_pretrained(folder, ds_config=ds_config(), **kwargs)

    def load_into_it() -> None:
        with hf_zero_stream.streaming(settings):
            hf_zero_stream.load_into(model, folder)

    ways = (share_it, load_it, lambda: load_it(dtype="auto"), load_into_it)
    found["errors"] = []
    for way in ways:
        try:
            way()
        except RuntimeError as error:
            found["errors"].append(f"{type(error).__name__}: {error}")

    # After that all is well, also with a rank that has lost the store for a while; and nothing stays in the store.
    last = f"{PREFIX}/load/{len(ways) - 1}/failed"
    presence = Presence.in_default_group()
    found["was noted"] = presence.store.get(last) is not None
    presence.store.is_lost = dist.get_rank() == 1
    model = auto_class.from_pretrained(folder, ds_config=ds_config())
    found["loaded"] = len(model.streaming_report.ranks)
    dist.barrier()
    found["is noted"] = Presence.in_default_group().store.get(last) is not None
    return found


def test_read_from_on_one_rank(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The same error on all ranks. None hangs."""
    folder = shutil.copytree(zoo_checkpoint("llama"), tmp_path / "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: config[key] for key in config if key != "dtype"}))
    text = "read_from='rank0' there, read_from='all' on rank 0"
    ranks = run_ranks(2, read_from_one_rank, folder, timeout=60)
    for found in ranks:
        assert len(found["errors"]) == 4
        assert all(error.startswith("DisagreementError: rank 1") and text in error for error in found["errors"]), found
        assert (found["was noted"], found["loaded"], found["is noted"]) == (True, 2, False)


def load_from_other_places(folder: Path, own: Path) -> int:
    """What may differ: where the checkpoint lies, and settings that are each rank's own."""
    rank = dist.get_rank()
    seen = shutil.copytree(folder, own / f"copy{rank}")
    section = {"staging_bytes": 2**20 * (1 + rank), "reader_threads": 1 + rank, "progress": rank == 0}
    config = {**ds_config(torch.bfloat16), "hf_zero_stream": section}
    model = hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(seen, ds_config=config)
    return len(model.streaming_report.ranks)


def test_what_may_differ(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    assert run_ranks(2, load_from_other_places, zoo_checkpoint("qwen3_moe"), tmp_path) == [2, 2]


def load_other_values(folder: Path, own: Path, settings: dict[str, Any]) -> str:
    """Rank 1 has a copy of the checkpoint from another step: the same headers, and other values."""
    seen = shutil.copytree(folder, own / f"copy{dist.get_rank()}")
    if dist.get_rank() == 1:
        add_one(seen)
    config = {**ds_config(), "hf_zero_stream": settings}
    try:
        hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(seen, ds_config=config)
    except hf_zero_stream.errors.HfZeroStreamError as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def test_other_values_in_another_folder(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    first, second = run_ranks(2, load_other_values, zoo_checkpoint("llama"), tmp_path / "checked", {})
    for error in (first, second):
        assert error.startswith("CheckpointError: ") and "has the same header as rank 0's and other values" in error
    assert "copy1" in first and "rank 1" in first
    off = {"verify": "off"}
    assert run_ranks(2, load_other_values, zoo_checkpoint("llama"), tmp_path / "off", off) == ["loaded"] * 2


def load_slowly(folder: Path, slow: int, pause: Callable[[], None], prepare: Callable[[], None] | None) -> int:
    """The slow rank pauses in its first read; returns how many ranks took part."""
    if prepare is not None:
        prepare()
    if dist.get_rank() == slow:
        paused = []

        def pausing(real: Callable[..., int], *args: Any) -> int:
            if not paused:
                paused.append(1)
                pause()
            return real(*args)

        replace_reads(pausing)
    return len(load(folder, {}).streaming_report.ranks)


def hold_the_lock() -> None:
    """No other thread of this process runs meanwhile."""
    ctypes.PyDLL(None).usleep(5_000_000)


def stop_the_process() -> None:
    """As by SIGSTOP, for some seconds: somebody else wakes it up."""
    waker = subprocess.Popen(["sh", "-c", f"sleep 5; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    waker.wait()


@pytest.mark.parametrize(
    ("slow", "pause", "prepare"),
    [
        (1, hold_the_lock, look_as_behind_firewalls),
        (0, hold_the_lock, None),
        (1, hold_the_lock, None),
        (0, hold_the_lock, look_as_on_other_hosts),
        (2, hold_the_lock, look_as_on_other_hosts),
        (0, stop_the_process, look_as_on_other_hosts),
        (1, stop_the_process, None),
    ],
)
def test_a_slow_rank_alarms_nobody(
    cluster: None, zoo_checkpoint: Checkpoint, slow: int, pause: Callable[[], None], prepare: Callable[[], None] | None
) -> None:
    """Its process is there, or nobody can look for it."""
    assert run_ranks(3, load_slowly, zoo_checkpoint("qwen3_moe"), slow, pause, prepare) == [3, 3, 3]


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


def three_models_in_threads(folders: list[Path]) -> list[str]:
    """Each thread loads a model of its own; ranks begin them in another order."""
    found: dict[int, str] = {}

    def work(number: int) -> None:
        load = hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained
        found[number] = message_of(lambda: load(folders[number], ds_config=ds_config()), "loaded")

    threads = [threading.Thread(target=work, args=(number,)) for number in ((0, 1, 2), (1, 2, 0))[dist.get_rank()]]
    for thread in threads:
        thread.start()
        time.sleep(0.2)
    for thread in threads:
        thread.join()
    return [found[number] for number in range(3)]


def test_three_models_in_threads(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Under ZeRO-3 all ranks must load the same, in the same order; else none waits for ever, and one says why."""
    folders = [zoo_checkpoint("llama"), zoo_checkpoint("qwen3_moe"), tmp_path / "again"]
    shutil.copytree(folders[0], folders[2])
    add_one(folders[2])
    found = run_ranks(2, three_models_in_threads, folders, timeout=60)
    messages = {text for of_rank in found for text in of_rank} - {"loaded"}
    assert messages and all("different things" in text or "what it loads" in text for text in messages), found
