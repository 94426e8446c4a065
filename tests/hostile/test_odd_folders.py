"""Folders that are odd, by a table: what stock loads is loaded, with the same values, unless that would lose some.

Where stock refuses a folder, so do we, on all ranks, with an error of ours or with its own.
"""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import hf_zero_stream
from hf_zero_stream.checkpoint.formats import read_map
from hf_zero_stream.checkpoint.index import check_files
from hf_zero_stream.errors import CheckpointError
from hf_zero_stream.sources.local import LocalFiles
from hf_zero_stream.sources.page_cache import ReadAhead
from tests import sampling
from tests.hostile.test_loads import INDEX, change_index
from tests.support.cli import run, run_json
from tests.support.cluster import run_ranks
from tests.support.messages import Messages
from tests.support.parity import ds_config, unequal
from tests.support.training_state import values_in
from tests.support.zoo import Checkpoint


Change = Callable[[Path], Any]


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], Any], metadata: Any = None) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"} if metadata is None else metadata or None)


def first_name(path: Path) -> str:
    with safe_open(path, "pt") as file:
        return min(file.keys())


# ---------------------------------------------------------------------------------------------------- odd, and loaded


def other_files(folder: Path) -> None:
    (folder / "notes.txt").write_text("odd")
    (folder / "broken.safetensors").write_bytes(b"no header")
    shutil.copy(shards(folder)[0], folder / "model-00009-of-00009.safetensors")


def index_names_fewer(folder: Path) -> None:
    change_index(folder, lambda index: index["weight_map"].pop(first_name(shards(folder)[0])))


def no_total_size(folder: Path) -> None:
    change_index(folder, lambda index: index.update(metadata={}))


def wrong_total_size(folder: Path) -> None:
    change_index(folder, lambda index: index["metadata"].update(total_size="many", more=None))


def copied_tensor(folder: Path) -> None:
    """The same values in both shards; the index names the first."""
    first, second = shards(folder)[:2]
    name = first_name(first)
    rewrite(second, lambda tensors: tensors.update({name: load_file(first)[name]}))


def moved_tensor(folder: Path) -> None:
    """The index says that it is in the first shard; it is in the second."""
    first, second = shards(folder)[:2]
    name = first_name(first)
    value = load_file(first)[name]
    rewrite(first, lambda tensors: tensors.pop(name))
    rewrite(second, lambda tensors: tensors.update({name: value}))


def promise_in_vain(folder: Path) -> None:
    change_index(folder, lambda index: index["weight_map"].update(old_head=shards(folder)[0].name))


def shard_without_tensors(folder: Path) -> None:
    save_file({}, folder / "empty.safetensors")
    change_index(folder, lambda index: index["weight_map"].update(old_head="empty.safetensors"))


def single_file_too(folder: Path) -> None:
    """Which goes before the index, in stock as here."""
    tensors = {name: tensor + 1 for shard in shards(folder) for name, tensor in load_file(shard).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def no_format(folder: Path) -> None:
    rewrite(shards(folder)[0], lambda tensors: None, metadata={"other": "1"})
    rewrite(shards(folder)[1], lambda tensors: None, metadata={})


def in_a_subfolder(folder: Path) -> None:
    for shard in shards(folder):
        (folder / "parts").mkdir(exist_ok=True)
        shard.rename(folder / "parts" / shard.name)
    change_index(
        folder, lambda index: index.update(weight_map={k: f"parts/{v}" for k, v in index["weight_map"].items()})
    )


def link_all(folder: Path) -> None:
    """Config and index too: absolute, relative, and by another link."""
    elsewhere = folder.parent / f"{folder.name}-elsewhere"
    elsewhere.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(elsewhere / path.name)
        target = elsewhere / path.name
        if number % 3 == 1:
            target = Path(os.path.relpath(target, folder))
        elif number % 3 == 2:
            (elsewhere / f"{number}").symlink_to(path.name)
            target = elsewhere / f"{number}"
        path.symlink_to(target)


def link_of_a_folder(folder: Path) -> None:
    folder.rename(folder.parent / f"{folder.name}-real")
    folder.symlink_to(folder.parent / f"{folder.name}-real")


def link_of_a_subfolder(folder: Path) -> None:
    in_a_subfolder(folder)
    (folder / "parts").rename(folder.parent / f"{folder.name}-parts")
    (folder / "parts").symlink_to(folder.parent / f"{folder.name}-parts")


def linked_single_file(folder: Path) -> None:
    single_file_too(folder)
    (folder / INDEX).unlink()
    for shard in shards(folder):
        shard.unlink()
    (folder / "model.safetensors").rename(folder.parent / f"{folder.name}-single")
    (folder / "model.safetensors").symlink_to(folder.parent / f"{folder.name}-single")


LOADED: dict[str, tuple[Change, str]] = {
    "other files": (other_files, ""),
    "an index that names fewer tensors": (index_names_fewer, ""),
    "no total_size": (no_total_size, ""),
    "a wrong total_size": (wrong_total_size, ""),
    "a tensor in two shards": (copied_tensor, "is in two shards or more"),
    "a tensor in another shard": (moved_tensor, "in another shard than the one that the index names"),
    "an entry without a tensor": (promise_in_vain, "Tensor 'old_head' is in no shard"),
    "a shard without tensors": (shard_without_tensors, "Tensor 'old_head' is in no shard"),
    "a single file besides": (single_file_too, ""),
    "no format in the metadata": (no_format, ""),
    "shards in a subfolder": (in_a_subfolder, ""),
    "links to files elsewhere": (link_all, ""),
    "a link to the folder": (link_of_a_folder, ""),
    "a link to a subfolder elsewhere": (link_of_a_subfolder, ""),
    "a single file that is a link": (linked_single_file, ""),
}
"""What to do to a folder, and what our warning says; stock loads all of them without a word."""


def load_odd(folders: list[Path]) -> list[dict[str, Any]]:
    """Under ZeRO-3 and outside it: what differs from a plain load, and our warnings."""
    messages = Messages()
    transformers.utils.logging.get_logger("hf_zero_stream").addHandler(messages)

    def load(folder: Path, **kwargs: Any) -> Any:
        return transformers.LlamaForCausalLM.from_pretrained(folder, output_loading_info=True, **kwargs)

    expected = [load(folder) for folder in folders]
    found = []
    for kwargs in ({}, {"ds_config": ds_config()}):
        for folder, (plain, plain_info) in zip(folders, expected, strict=True):
            before = len(messages.found)
            with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(share_reads=True)):
                model, info = load(folder, **kwargs)
            different = unequal(model, plain)
            if info != plain_info:
                different.append(f"{info}, {plain_info}")
            found.append({"different": different, "messages": messages.found[before:]})
    return found


def test_what_stock_loads_is_loaded(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """On one rank and on two; oddities of the index are said once, on the main process."""
    odd = dict(sampling.every(2, LOADED.items()))
    folders = [shutil.copytree(zoo_checkpoint("llama"), tmp_path / str(number)) for number in range(len(odd))]
    for folder, (change, _) in zip(folders, odd.values(), strict=True):
        change(folder)
    for world_size in (1, 2):
        for rank, found in enumerate(run_ranks(world_size, load_odd, folders)):
            for (name, (_, text)), shared, partitioned in zip(
                odd.items(), found[: len(odd)], found[len(odd) :], strict=True
            ):
                for of_load in (shared, partitioned):
                    assert of_load["different"] == [], (name, of_load)
                    is_ours = world_size > 1 or of_load is partitioned
                    assert len(of_load["messages"]) == (rank == 0 and is_ours and text != ""), (name, of_load)
                    assert all(text in message for message in of_load["messages"])


# --------------------------------------------------------------------------------------------------- odd, and refused


def no_metadata(folder: Path) -> None:
    change_index(folder, lambda index: index.pop("metadata"))


def capitals(folder: Path) -> None:
    for shard in shards(folder):
        shard.rename(shard.with_suffix(".SAFETENSORS"))
    change_index(
        folder,
        lambda index: index.update(
            weight_map={k: v.replace(".safetensors", ".SAFETENSORS") for k, v in index["weight_map"].items()}
        ),
    )


def missing_shard_of_no_use(folder: Path) -> None:
    change_index(folder, lambda index: index["weight_map"].update(old_head="gone.safetensors"))


def lost_tensor(folder: Path) -> None:
    rewrite(shards(folder)[0], lambda tensors: tensors.pop(min(tensors)))


def unnamed_copy(folder: Path) -> None:
    copied_tensor(folder)
    index_names_fewer(folder)


def link_to(target: str | None) -> Change:
    def change(folder: Path) -> None:
        shard = shards(folder)[0]
        shard.unlink()
        if target is None:
            os.mkfifo(folder.parent / f"{folder.name}-pipe")
        shard.symlink_to(folder.parent / f"{folder.name}-pipe" if target is None else target)

    return change


REFUSED: dict[str, tuple[Change, bool, str]] = {
    "no metadata": (no_metadata, False, "metadata: expected an object"),
    "an extension in capitals": (capitals, False, "does not end in .safetensors"),
    "a missing shard that holds nothing of use": (missing_shard_of_no_use, False, "gone.safetensors"),
    "a wanted tensor that is in no shard": (lost_tensor, True, "but no shard holds it"),
    "a tensor in two shards, of which the index names none": (unnamed_copy, True, "no index says which"),
    "a link to a folder": (link_to(os.sep), False, "found a folder"),
    "a link to a device": (link_to(os.devnull), False, "found a pipe, a socket or a device"),
    "a link to nowhere": (link_to("nowhere"), False, "No such file"),
    "a link to a pipe": (link_to(None), False, "found a pipe, a socket or a device"),
}
"""What to do to a folder, whether stock loads it (and loses values, or leaves them to chance), and our error."""


def error_of(folder: Path, **kwargs: Any) -> str:
    try:
        transformers.LlamaForCausalLM.from_pretrained(folder, **kwargs)
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def errors_of_odd(folders: list[Path]) -> list[list[str]]:
    """Stock's error and ours, without ZeRO-3 and with it, for each folder; "" if it loads."""
    # Stock would wait for somebody to write into a pipe.
    stock = [
        "would hang" if any(path.is_fifo() for path in folder.iterdir()) else error_of(folder) for folder in folders
    ]
    with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(share_reads=True)):
        shared = [error_of(folder) for folder in folders]
        partitioned = [error_of(folder, ds_config=ds_config()) for folder in folders]
    return [list(errors) for errors in zip(stock, shared, partitioned, strict=True)]


def test_what_is_refused(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folders = [shutil.copytree(zoo_checkpoint("llama"), tmp_path / str(number)) for number in range(len(REFUSED))]
    for folder, (change, _, _) in zip(folders, REFUSED.values(), strict=True):
        change(folder)
    for found in run_ranks(2, errors_of_odd, folders):
        for (name, (_, stock_loads, text)), (stock, *ours) in zip(REFUSED.items(), found, strict=True):
            assert (stock == "") is stock_loads, (name, stock)
            for error in ours:
                assert error.startswith(("CheckpointError", "ReadError")) and text in error, (name, error)


# ------------------------------------------------------------------------------------------------ which copy counts


@pytest.mark.plugin("tools")
@pytest.mark.parametrize("named", [0, 1])
def test_the_copy_that_the_index_names(zoo_checkpoint: Checkpoint, tmp_path: Path, named: int) -> None:
    """Of different values, whichever shard comes last."""
    folder = shutil.copytree(zoo_checkpoint("llama"), tmp_path / "llama")
    name = first_name(shards(folder)[0])
    copied_tensor(folder)
    rewrite(shards(folder)[1], lambda tensors: tensors[name].add_(1))
    change_index(folder, lambda index: index["weight_map"].update({name: shards(folder)[named].name}))
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    index = read_map(shards(folder), weight_map)
    assert index.entries[name].shard == named and len(index.notes) == 1
    found = run_json("verify", str(folder), code=1)
    assert [(fault["kind"], fault["file"]) for fault in found["faults"]] == [("duplicate", shards(folder)[1].name)]
    assert "two shards" in run("inspect", str(folder), "--no-model").stdout
    assert torch.equal(values_in(folder)[name], load_file(shards(folder)[named])[name])


@pytest.mark.plugin("tools", "forecast")
def test_what_is_promised_in_vain_is_named(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """`inspect` and `verify` name it, `plan` asks the model whether it is wanted."""
    folder = shutil.copytree(zoo_checkpoint("llama"), tmp_path / "llama")
    promise_in_vain(folder)
    assert run_json("inspect", str(folder), "--no-model")["promised_in_vain"] == ["old_head"]
    assert [fault["kind"] for fault in run_json("verify", str(folder), code=1)["faults"]] == ["missing"]
    assert hf_zero_stream.plan(str(folder), world_size=2).load.cost.bytes_needed
    lost_tensor(folder)
    with pytest.raises(CheckpointError, match="no shard holds it"):
        hf_zero_stream.plan(str(folder), world_size=2)


# --------------------------------------------------------------------------------------------------------- links


@pytest.mark.plugin("tools", "forecast")
def test_links_are_used_like_files(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = shutil.copytree(zoo_checkpoint("llama"), tmp_path / "llama")
    link_all(folder)
    found = run_json("verify", str(folder))
    assert found["sound"] and all(shard.name in found["notes"][0] for shard in shards(folder))
    assert run_json("inspect", str(folder), "--no-model")["shards"][0]["file"] == shards(folder)[0].name
    assert hf_zero_stream.plan(str(folder), world_size=2).load.cost.bytes_needed


def test_saving_replaces_links(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """It does not write through them, and removes old ones even where they lead nowhere."""
    folder = shutil.copytree(zoo_checkpoint("llama"), tmp_path / "llama")
    link_all(folder)
    (folder / "model-00007-of-00007.safetensors").symlink_to("nowhere")
    elsewhere = tmp_path / "llama-elsewhere"
    before = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    hf_zero_stream.save_pretrained(model, folder)
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == before
    weights = [path for path in folder.iterdir() if "safetensors" in path.name]
    assert [path.name for path in weights] == ["model.safetensors"] and not weights[0].is_symlink()
    saved = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert not unequal(saved, model)


def test_a_link_that_is_changed_while_it_is_loaded(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """It leads to a sound file when it is looked at, and to a pipe, or another file, when it is opened."""
    source = shards(zoo_checkpoint("llama"))[0]
    shutil.copy(source, tmp_path / "other")
    os.mkfifo(tmp_path / "pipe")
    link = tmp_path / "link.safetensors"

    def lead_to(target: Path) -> None:
        link.unlink(missing_ok=True)
        link.symlink_to(target)

    lead_to(source)
    check_files([str(link)])
    index = read_map([link])
    lead_to(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="regular file"):
        read_map([link])
    with closing(LocalFiles(index.shards)) as files, pytest.raises(CheckpointError, match="regular file"):
        files.open([0])
    ahead = ReadAhead([str(link)], 0, 1)
    ahead.stop()
    with closing(LocalFiles(index.shards)) as files:
        lead_to(source)
        files.open([0])
        lead_to(tmp_path / "other")
        with pytest.raises(CheckpointError, match="replaced"):
            files.check_unchanged()
