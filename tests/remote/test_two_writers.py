"""Two jobs save to one place, and the older one hangs in the middle: what is there afterwards is the newer one's."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_zero_stream
from hf_zero_stream import StreamingConfig
from hf_zero_stream.errors import HfZeroStreamError, PlaceTakenError, SaveError
from hf_zero_stream.plugins.remote import objects
from hf_zero_stream.plugins.remote.lists import LIST, parse_list
from hf_zero_stream.plugins.remote.objects import RemoteFolder, StreamedObject
from hf_zero_stream.saving.publication import Publication
from tests.support.buckets import BUCKET, Requests, s3_bucket


URL = f"s3://{BUCKET}/run"


@pytest.fixture
def requests() -> Requests:
    return Requests()


@pytest.fixture
def bucket(requests: Requests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "nothing").mkdir()
    with s3_bucket(tmp_path / "nothing", requests) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        objects._store.cache_clear()
        yield
    objects._store.cache_clear()


def model(value: float, layers: int = 1) -> Any:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=2, vocab_size=97
    )
    made = LlamaForCausalLM(config)
    with torch.no_grad():
        for param in made.parameters():
            param.fill_(value)
    return made


def save_weights(value: float, layers: int = 1) -> None:
    hf_zero_stream.save_pretrained(model(value, layers), URL, max_shard_size="20KB")


def save_training(value: float, layers: int = 1) -> None:
    """A training whose parameters, moments and data are all `value`."""
    trained = model(value, layers)
    optimizer = torch.optim.AdamW(trained.parameters())
    for param in trained.parameters():
        moments = {name: torch.full_like(param, value) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[param] = {"step": torch.tensor(1.0), **moments}
    hf_zero_stream.save_state(trained, URL, optimizer=optimizer, tag="t", data=value, max_shard_size="20KB")


def save_adapter(value: float, layers: int = 1) -> None:
    trained = model(value, layers)
    trained.add_adapter(LoraConfig(target_modules=["q_proj"], r=2))
    with torch.no_grad():
        for name, param in trained.named_parameters():
            if "lora" in name:
                param.fill_(value)
    hf_zero_stream.save_pretrained(trained, URL)


def loaded_weights(layers: int) -> set[float]:
    with hf_zero_stream.streaming(StreamingConfig(progress=False)):
        found = AutoModelForCausalLM.from_pretrained(URL)
    assert found.config.num_hidden_layers == layers, "somebody else's config"
    return {float(it) for param in found.parameters() for it in param.detach().unique()}


def loaded_training(layers: int) -> set[float]:
    return resumed(layers) | loaded_weights(layers)


def resumed(layers: int = 1) -> set[float]:
    trained = model(0.0, layers)
    optimizer = torch.optim.AdamW(trained.parameters())
    resumed = hf_zero_stream.load_state(trained, URL, optimizer=optimizer)
    values = [*trained.parameters(), *(it["exp_avg"] for it in optimizer.state.values())]
    return {resumed.data, *(float(it) for each in values for it in each.detach().unique())}


def loaded_adapter(layers: int) -> set[float]:
    from safetensors.torch import load

    found = load(RemoteFolder(URL).read("adapter_model.safetensors"))
    return {float(it) for each in found.values() for it in each.unique()}


class Hanging:
    """One thread waits before its n-th call of a method until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int) -> None:
        self.reached, self._go, self._left = threading.Event(), threading.Event(), number
        self.thread: threading.Thread | None = None
        original = getattr(owner, name)

        def hung(it: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_mine():
                self._left -= 1
                if self._left == 0:
                    self.reached.set()
                    assert self._go.wait(60)
            return original(it, *args, **kwargs)

        monkeypatch.setattr(owner, name, hung)

    def _is_mine(self) -> bool:
        """Whether this is the thread of the older save, or one of the pool that writes its small files."""
        current = threading.current_thread()
        return current is self.thread or (self._left > 0 and current.name.startswith("ThreadPool"))

    def run(self, work: Callable[[], None]) -> list[BaseException]:
        errors: list[BaseException] = []

        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        self.thread = threading.Thread(target=guarded)
        self.thread.start()
        return errors

    def hangs(self) -> bool:
        """Whether it has come to that call; else it is at its end."""
        assert self.thread is not None
        while self.thread.is_alive() and not self.reached.wait(0.01):
            pass
        return self.reached.is_set()

    def let_go(self) -> None:
        self._go.set()
        assert self.thread is not None
        self.thread.join(60)


KINDS = {
    "weights": (save_weights, loaded_weights),
    "training": (save_training, loaded_training),
    "adapter": (save_adapter, loaded_adapter),
}
WRITE, SECOND_LIST, INDEX = (StreamedObject, "write", 2), (RemoteFolder, "put", 2), (RemoteFolder, "put", 4)
MOMENTS = [
    *((StreamedObject, name, number) for name, number in (("__init__", 1), ("write", 2), ("finish", 1))),
    *((RemoteFolder, name, number) for name, number in (("put", 1), ("put", 2), ("put", 3), ("put", 4), ("put", 99))),
    *((RemoteFolder, name, 1) for name in ("remove", "objects", "copy")),
]


@pytest.mark.parametrize(
    ("kind", "compares", "has_earlier", "moments"),
    [
        ("weights", True, True, [WRITE, SECOND_LIST, INDEX]),
        ("weights", False, False, [WRITE, INDEX]),
        ("adapter", False, True, [(RemoteFolder, "copy", 1), WRITE]),
        ("training", True, True, [WRITE]),
        *(
            pytest.param(kind, compares, has_earlier, MOMENTS, marks=pytest.mark.slow)
            for kind in KINDS
            for compares in (True, False)
            for has_earlier in (True, False)
        ),
    ],
)
def test_the_older_one_hangs(
    bucket: None,
    requests: Requests,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    compares: bool,
    has_earlier: bool,
    moments: list[tuple[Any, str, int]],
) -> None:
    """At a store that compares versions, or does not, at each of its moments."""
    save, load = KINDS[kind]
    requests.compares = compares
    ends = set()
    for moment in moments:
        if has_earlier:
            save(1.0)
        with monkeypatch.context() as patch:
            hanging = Hanging(patch, *moment)
            errors = hanging.run(lambda: save(2.0, 2))
            hangs = hanging.hangs()
            save(3.0, 3)
            assert load(3) == {3.0}, moment
            hanging.let_go()
        # Nobody can tell that one hung which had not taken the place, where the list cannot be compared.
        is_later = hangs and moment[1:] == ("put", 1) and not compares and has_earlier
        assert load(2 if is_later else 3) == {2.0 if is_later else 3.0}, (moment, errors)
        assert all(isinstance(error, PlaceTakenError) for error in errors), errors
        ends.add((hangs, bool(errors)))
        save(4.0)  # the place can be saved to
        assert load(1) == {4.0}
        names = {*RemoteFolder(URL).below("")}
        assert parse_list(RemoteFolder(URL).read(LIST), LIST).stage == "done"
        assert len({name.split("-")[1] for name in names if name.startswith("model-")}) <= 1, names
        RemoteFolder(URL).remove(names)
    assert (True, True) in ends
    assert moments is not MOMENTS or (True, False) in ends


@pytest.mark.parametrize("has_earlier", [True, False])
def test_what_a_proxy_does(bucket: None, requests: Requests, has_earlier: bool) -> None:
    """A PUT that is cut, and a LIST that is answered by an empty or another page: an error, and nothing is lost."""
    if has_earlier:
        save_weights(1.0)
    empty = b'<?xml version="1.0"?><ListBucketResult><Name>checkpoints</Name><KeyCount>0</KeyCount></ListBucketResult>'
    login = b"<html>Log in</html>"
    faults: list[tuple[str, Any, str]] = [
        ("cut", lambda method, path: 100 if method == "PUT" and "-00002-of-" in path else None, "the store lists 100"),
        ("instead", lambda method, path: empty if "list-type" in path else None, "the store lists no such object"),
        (
            "instead",
            lambda method, path: login if "list-type" in path else None,
            "the store lists no",
        ),
        ("instead", lambda method, path: login if method == "GET" else None, "page of a proxy"),
    ]
    for name, fault, message in faults:
        usual = getattr(requests, name)
        setattr(requests, name, fault)
        with pytest.raises(HfZeroStreamError, match=message):
            save_weights(2.0)
        setattr(requests, name, usual)
        if has_earlier:
            assert loaded_weights(1) == {1.0}
    cuts = iter([50])
    requests.cut = lambda method, path: next(cuts, None) if method == "PUT" and path.endswith("index.json") else None
    save_weights(2.5)  # it is sent once more
    assert loaded_weights(1) == {2.5}
    cuts = iter([120])
    requests.cut = lambda method, path: next(cuts, None) if method == "PUT" and path.endswith(LIST) else None
    save_weights(2.75)  # so is the list, which is the first that is sent
    assert loaded_weights(1) == {2.75}
    for cut in ("index.json", LIST):
        requests.cut = lambda method, path, cut=cut: 120 if method == "PUT" and path.endswith(cut) else None
        with pytest.raises(SaveError, match="a proxy between"):
            save_weights(2.7)
    requests.cut = lambda method, path: None
    save_weights(3.0)
    assert loaded_weights(1) == {3.0}
    assert len({name.split("-")[1] for name in RemoteFolder(URL).below("") if name.startswith("model-")}) == 1


def test_a_page_from_some_moment_on(bucket: None, requests: Requests) -> None:
    """Whoever has an error has lost nothing; where the save may have happened, or has, the error says so."""
    found = set()
    for number in count(1):
        save_weights(1.0)
        gets = iter(range(number - 1))
        requests.instead = lambda method, path, gets=gets: (
            b"<html>Log in</html>"
            if method == "GET" and "list-type" not in path and next(gets, None) is None
            else None
        )
        message = ""
        try:
            save_weights(2.0)
        except HfZeroStreamError as error:
            message = str(error)
        requests.instead = lambda method, path: None
        has_happened = loaded_weights(1) == {2.0}
        says_so = "This save is complete" in message or "Perhaps this save has happened" in message
        assert says_so if has_happened and message else has_happened or message, (number, message)
        found.add((has_happened, bool(message)))
        if not message:
            break
    assert found >= {(False, True), (True, False)}


@pytest.mark.parametrize("name", ["training_state.json", "index.json"])
def test_a_save_that_is_not_done_is_read_whole(bucket: None, requests: Requests, name: str) -> None:
    """It has happened, and some of its small files are not there yet: a resume reads all of it."""
    save_training(1.0)
    requests.fault = lambda method, path: 403 if method == "PUT" and path.endswith(name) else 0
    with pytest.raises(SaveError, match="This save is complete"):
        save_training(2.0)
    assert resumed() == {2.0}
    requests.fault = lambda method, path: 0
    assert resumed() == {2.0}
    save_training(3.0)
    assert loaded_training(1) == {3.0}


def test_requests(bucket: None, requests: Requests) -> None:
    """No more than before places had owners: 10 for a first save of 3 small files, and 11 for each later one."""
    for most in (10, 11, 11):
        requests.seen.clear()
        hf_zero_stream.save_pretrained(model(1.0), URL)
        assert len(requests.seen) - 1 <= most, requests.seen  # one is for the shard


def test_one_folder(tmp_path: Path) -> None:
    """The older one hangs before its renames: it is not published, and the newer one is."""
    begun, go = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def older() -> None:

        try:
            publication = Publication.begin(tmp_path)
            (publication.temporary / "config.json").write_text("older")
            begun.set()
            assert go.wait(60)
            publication.commit("model.safetensors", "model.safetensors.index.json")
        except SaveError as error:
            errors.append(error)
            publication.abandon()

    thread = threading.Thread(target=older)
    thread.start()
    assert begun.wait(60)
    hf_zero_stream.save_pretrained(model(3.0), tmp_path)
    go.set()
    thread.join(60)
    assert "another save (process " in str(errors[0]) and isinstance(errors[0], PlaceTakenError)
    found = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {float(it) for param in found.parameters() for it in param.detach().unique()} == {3.0}
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
