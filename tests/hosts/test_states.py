"""States in the folders of hosts: any hosts that have all pieces go on, with the bits of a state on a shared disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from tests.state.test_beside import own_part
from tests.state.test_refused import message_of
from tests.support.cluster import run_ranks
from tests.support.held_writer import held_writer
from tests.support.hosts import can_mount, move_to_host
from tests.support.parity import whole_values
from tests.support.plugins import without_plugin
from tests.support.saving import different
from tests.support.simulated_hosts import join_host
from tests.support.training_state import (
    different_states,
    engine_of,
    plain_training,
    state_config,
    train,
    train_plain,
    two_groups,
)


pytestmark = pytest.mark.skipif(not can_mount(), reason="mounting in a namespace of its own is not allowed here")

Checkpoint = Callable[..., Path]


def halves(engine: Any) -> dict[str, torch.Tensor]:
    """What stands for an average of weights: half of what this rank has of each."""
    return {name: own_part(param) / 2 for name, param in engine.module.named_parameters()}


def train_and_save(
    checkpoint: Path,
    disks: Path,
    folder: Path,
    hosts: Sequence[str],
    stage: int,
    copies: int,
    asynchronous: bool = False,
) -> Any:
    """Save after 2 steps and after 4, on hosts; and on a shared disk. In the background, steps come before writes."""
    import hf_zero_stream

    join_host(hosts, disks, folder)
    engine = engine_of(checkpoint, state_config(stage), two_groups)
    losses = train(engine, range(2))
    how: dict[str, Any] = {"hosts": True, "copies": copies, "asynchronous": asynchronous}
    hf_zero_stream.save_state(engine, folder, data={"position": 7}, **how)
    losses += train(engine, range(2, 4))
    beside = {"ema": halves(engine)}
    hf_zero_stream.save_state(engine, disks.parent / "shared", beside=beside)
    with held_writer() as writer:
        saved = hf_zero_stream.save_state(engine, folder, keep=2, data={"position": 8}, beside=beside, **how)
        if asynchronous:
            losses += train(engine, range(4, 6))
            assert not saved.done
            writer.let_go()
            assert saved.wait().asynchronous
            return losses
    return losses + train(engine, range(4, 6))


def resume(checkpoint: Path, disks: Path, folder: Path, hosts: Sequence[str], stage: int) -> dict[str, Any]:
    """The losses of two steps, from what hosts have, and from the shared disk."""
    import hf_zero_stream

    join_host(hosts, disks, folder)
    found = {}
    for name in ("hosts", "shared"):
        engine = engine_of(checkpoint, state_config(stage), two_groups)
        beside = {"ema": {name: values.zero_() for name, values in halves(engine).items()}}
        if name == "hosts":
            resumed = hf_zero_stream.load_state(engine, folder, hosts=True, beside=beside)
            assert (resumed.tag, resumed.data) == ("global_step4", {"position": 8})
        else:
            hf_zero_stream.load_state(engine, disks.parent / "shared", beside=beside)
        assert all(torch.equal(values, beside["ema"][name]) for name, values in halves(engine).items())
        found[name] = train(engine, range(4, 6))
        hf_zero_stream.save_state(engine, disks.parent / f"again {name}", beside=beside)
    dist.barrier()
    return found


@pytest.mark.plugin("relay")
@pytest.mark.parametrize(("stage", "asynchronous"), [(3, True), (1, False), (3, False), (1, True)])
def test_two_of_three_hosts_go_on(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, stage: int, asynchronous: bool
) -> None:
    """And other numbers of ranks, and a host that has nothing."""
    disks, folder = tmp_path / "disks", tmp_path / "own"
    folder.mkdir()
    checkpoint = zoo_checkpoint("qwen3_moe")
    run_ranks(3, train_and_save, checkpoint, disks, folder, "abc", stage, 1, asynchronous)
    assert len(list((disks / "a").glob("state-*"))) == 2
    shutil.rmtree(disks / "b")
    for hosts in ("ac", "cada"):
        for found in run_ranks(len(hosts), resume, checkpoint, disks, folder, hosts, stage):
            assert found["hosts"] == found["shared"]
        assert different(tmp_path / "again hosts", tmp_path / "again shared") == []
        assert different_states(tmp_path / "again hosts", tmp_path / "again shared") == []


# ------------------------------------------------------------------------------------------------ what is not whole


def save_plain(checkpoint: Path, disks: Path, folder: Path, hosts: Sequence[str], **kwargs: Any) -> list[str]:
    """Save after one step and after two; the messages of errors."""
    import hf_zero_stream

    join_host(hosts, disks, folder)
    model, optimizer, scheduler = plain_training(checkpoint, None)
    errors = []
    for step in range(2):
        train_plain(model, optimizer, scheduler, [step])
        errors.append(
            message_of(
                lambda: hf_zero_stream.save_state(
                    model, folder, optimizer=optimizer, scheduler=scheduler, hosts=True, keep=2, **kwargs
                )
            )
        )
    return errors


def load_plain(
    checkpoint: Path, disks: Path, folder: Path, hosts: Sequence[str], verify: Any = "sizes"
) -> tuple[int, str]:
    """The step that is gone on from; the message of an error."""
    import hf_zero_stream

    join_host(hosts, disks, folder)
    model, optimizer, scheduler = plain_training(checkpoint, None)
    found = []

    def load() -> None:
        with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(verify=verify)):
            resumed = hf_zero_stream.load_state(model, folder, optimizer=optimizer, scheduler=scheduler, hosts=True)
        found.append(resumed.counters["global_steps"])

    message = message_of(load)
    return (*found, 0)[0], message


@pytest.mark.plugin("verify")
def test_the_newest_that_is_whole(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    disks, folder = tmp_path / "disks", tmp_path / "own"
    folder.mkdir()
    checkpoint = zoo_checkpoint("llama")
    assert run_ranks(3, save_plain, checkpoint, disks, folder, "abc") == [["no error"] * 2] * 3
    # Its temporary folders are gone, and nobody else may look.
    assert [path.name for path in (disks / "a").iterdir() if not path.name.startswith("state-")] == []
    older, newer = sorted((disks / "a").glob("state-*"))
    modes = {path.stat().st_mode & 0o777 for path in [newer, *(newer / "pieces").iterdir()]}
    assert modes == {0o700, 0o600}
    # A stock reader is not given zeros.
    with pytest.raises(Exception, match="(?i)incomplete|invalid|header"):
        safe_open(newer / "model.safetensors", "pt")

    # A piece that has changed is not read, if all is verified.
    piece = disks / "a" / newer.name / "pieces" / "rank-00000"
    before = piece.read_bytes()
    piece.write_bytes(bytes([before[0] ^ 1]) + before[1:])
    assert run_ranks(2, load_plain, checkpoint, disks, folder, "ab", "full") == [(2, "no error")] * 2  # b has a copy
    assert run_ranks(2, load_plain, checkpoint, disks, folder, "ac", "full") == [(1, "no error")] * 2
    piece.write_bytes(before)

    # Of the newer one, b has rank 0's piece and its own alone.
    (disks / "b" / newer.name / "pieces" / "rank-00001").unlink()
    assert run_ranks(2, load_plain, checkpoint, disks, folder, "bc") == [(2, "no error")] * 2  # c has a copy of it
    (disks / "c" / newer.name / "pieces" / "rank-00001").write_bytes(b"cut")
    assert run_ranks(2, load_plain, checkpoint, disks, folder, "bc") == [(1, "no error")] * 2
    for _, message in run_ranks(1, load_plain, checkpoint, disks, folder, "c"):
        assert "rank-00000" in message and "which lie on a, b" in message and "rank-00002" not in message, message
        assert newer.name in message and older.name in message
    for _, message in run_ranks(1, load_plain, checkpoint, disks, folder, "d"):
        assert "no host has a state there" in message


@pytest.mark.parametrize("fault", ["shared", "link", "others write", "no room", "a full container"])
def test_folders_that_are_refused(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, fault: str) -> None:
    checkpoint, folder = zoo_checkpoint("llama"), tmp_path / "own"
    expected = {
        "shared": "see the same one",
        "link": "is a link",
        "others write": "may be written by others",
        "no room": "are free",
        "a full container": "1000 B of memory are free",
    }[fault]
    folder.mkdir()
    for of_rank in run_ranks(2, save_refused, checkpoint, tmp_path / "disks", folder, fault):
        assert expected in of_rank, of_rank
    saved = [path for path in tmp_path.rglob("*") if path.is_file() and path.parent.name != "container"]
    assert [path for path in saved if path.suffix != ".json"] == []


def place_in_container(place: Path, room: int) -> None:
    """Have this process read that it is in a container whose limit leaves so many bytes."""
    from hf_zero_stream.sources import page_cache

    place.mkdir()
    (place / "cgroup").write_text("0::/\n")
    (place / "mountinfo").write_text(f"33 26 0:30 / {place} rw - cgroup2 cgroup rw\n")
    for name, text in (("max", "5000"), ("current", str(5000 - room)), ("stat", "inactive_file 0")):
        (place / f"memory.{name}").write_text(text)
    page_cache._PROCESS = place


def save_refused(checkpoint: Path, disks: Path, folder: Path, fault: str) -> str:
    import hf_zero_stream
    from hf_zero_stream.plugins.hosts import save as host_save

    if fault == "shared":
        move_to_host("ab"[dist.get_rank()])
    else:
        join_host("ab", disks, folder)
    if fault == "link" and dist.get_rank() == 1:
        (folder / "real").mkdir()
        (folder / "state").symlink_to(folder / "real")
    if fault == "others write" and dist.get_rank() == 1:
        (folder / "state").mkdir()
        (folder / "state").chmod(0o777)
    if fault == "no room" and dist.get_rank() == 1:
        usage = shutil.disk_usage(folder)._replace(free=1000)
        host_save.shutil.disk_usage = lambda path: usage  # type: ignore[assignment]
    model, optimizer, scheduler = plain_training(checkpoint, None)
    train_plain(model, optimizer, scheduler, [0])
    if fault == "a full container" and dist.get_rank() == 1:  # whose memory the folder is in
        place_in_container(folder.parent / "container", 1000)
        vars(host_save)["kind_of_file_system"] = lambda path: "tmpfs"
    return message_of(lambda: hf_zero_stream.save_state(model, folder / "state", optimizer=optimizer, hosts=True))


def load_weights(checkpoint: Path, disks: Path, folder: Path, hosts: Sequence[str], zero: bool) -> dict[str, bool]:
    """Whether functions that load weights give those of the newest state of the hosts; and the error of one alone."""
    import torch
    from transformers import AutoModelForCausalLM

    import hf_zero_stream

    join_host(hosts, disks, folder)
    place, config = max(folder.glob("state-*")), state_config(3) if zero else None
    how = {"dtype": torch.float32, **({"ds_config": config} if zero else {})}
    wanted = AutoModelForCausalLM.from_pretrained(disks.parent / "shared", dtype=torch.float32).state_dict()
    found = {}
    with hf_zero_stream.streaming():
        loaded = AutoModelForCausalLM.from_pretrained(place, **how)
        into = AutoModelForCausalLM.from_pretrained(checkpoint, **how)
    hf_zero_stream.load_into(into, str(place))
    for name, model in (("from_pretrained", loaded), ("load_into", into)):
        values = whole_values(model)
        found[name] = all(torch.equal(values[key], wanted[key]) for key in values)
    dist.barrier()
    return found


@pytest.mark.parametrize("zero", [True, False])
def test_weights_of_a_state(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, zero: bool) -> None:
    disks, folder = tmp_path / "disks", tmp_path / "own"
    folder.mkdir()
    checkpoint = zoo_checkpoint("llama")
    run_ranks(2, train_and_save, checkpoint, disks, folder, "ab", 3, 1)
    for hosts in ("ab", "a"):
        for found in run_ranks(len(hosts), load_weights, checkpoint, disks, folder, hosts, zero):
            assert found == {"from_pretrained": True, "load_into": True}


def load_for_fsdp2(disks: Path, folder: Path, hosts: Sequence[str], prepares: bool) -> bool:
    """Whether a model that accelerate shards, or that is used without it, has the newest state's values."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.support.fsdp2 import announce, load, make_accelerator

    join_host(hosts, disks, folder)
    wanted = AutoModelForCausalLM.from_pretrained(disks.parent / "shared", dtype=torch.float32).state_dict()
    announce()
    accelerator = make_accelerator()
    model = load("llama", max(folder.glob("state-*")), dtype=torch.float32)
    if prepares:
        model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    else:
        model(input_ids=torch.ones(1, 4, dtype=torch.long))
    values = whole_values(model)
    dist.barrier()
    return all(torch.equal(values[key], wanted[key]) for key in values)


@pytest.mark.plugin("relay")
@pytest.mark.parametrize(("hosts", "prepares"), [("ab", True), ("aa", False)])
def test_weights_of_a_state_under_fsdp2(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, hosts: str, prepares: bool
) -> None:
    """Ranks read the pieces of each other's hosts in ``prepare()``; one that is alone reads those of its own."""
    disks, folder = tmp_path / "disks", tmp_path / "own"
    folder.mkdir()
    run_ranks(2, train_and_save, zoo_checkpoint("llama"), disks, folder, hosts, 3, 0)
    assert run_ranks(2, load_for_fsdp2, disks, folder, hosts, prepares) == [True, True]


def by_settings(checkpoint: Path, work: Path, hosts: Sequence[str], steps: Sequence[int], client_state: Any) -> Any:
    """Go on up to a step, saving each second one on hosts; and on the shared disk, if there is a `client_state`."""
    import hf_zero_stream

    join_host(hosts, work / "disks", work / "own")
    config = hf_zero_stream.StreamingConfig(host_states_every=2, host_states_folder=str(work / "own"))
    engine = engine_of(checkpoint, state_config(3), two_groups)
    with hf_zero_stream.streaming(config):
        loaded = engine.load_checkpoint(str(work / "shared"))
        begin = engine.global_steps
        losses = train(engine, steps[begin:])
        if client_state is not None:
            own = client_state if dist.get_rank() == 0 else {}  # as DeepSpeed writes only that at stages 0 to 2
            engine.save_checkpoint(str(work / "shared"), client_state=own)
        losses += train(engine, [steps[-1] + 1])
    dist.barrier()
    return begin, str(loaded[0]), losses, [path.name for path in (work / "own").rglob("state-*")]


def test_an_engine_by_settings(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The newer of its states on hosts and on the shared disk is taken. With a client_state, none is on hosts."""
    (tmp_path / "own").mkdir()
    checkpoint = zoo_checkpoint("llama")
    (begin, _, whole, left), *_ = run_ranks(2, by_settings, checkpoint, tmp_path, "ab", range(5), None)
    assert begin == 0 and len(left) == 1 and len(whole) == 6  # of steps 2 and 4
    for begin, loaded, losses, _ in run_ranks(2, by_settings, checkpoint, tmp_path, "ab", range(5), {}):
        assert begin == 4 and str(tmp_path / "own") in loaded and losses == whole[4:]
    for begin, loaded, losses, left in run_ranks(2, by_settings, checkpoint, tmp_path, "ab", range(7), {"batch": 3}):
        assert begin == 5 and str(tmp_path / "shared") in loaded and losses[:1] == whole[5:] and left == []
    for begin, _, _, left in run_ranks(2, by_settings, checkpoint, tmp_path, "ab", range(9), {}):
        assert begin == 7 and left == []


def without_the_plugin(checkpoint: Path, folder: Path) -> list[str]:
    import hf_zero_stream

    model, optimizer, _ = plain_training(checkpoint, None)
    with without_plugin("hosts"):
        return [
            message_of(lambda: hf_zero_stream.save_state(model, folder, optimizer=optimizer, hosts=True)),
            message_of(lambda: hf_zero_stream.load_state(model, folder, optimizer=optimizer, hosts=True)),
        ]


def test_without_the_plugin(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    for of_rank in run_ranks(2, without_the_plugin, zoo_checkpoint("llama"), tmp_path / "own"):
        for message, what in zip(of_rank, ("save_state", "load_state"), strict=True):
            assert f"{what}(hosts=True) needs the plug-in 'hosts'" in message
    assert not (tmp_path / "own").exists()


def test_one_process(tmp_path: Path) -> None:
    """Without a process group: one host, and no copies."""
    import torch

    import hf_zero_stream

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(5, 3)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = make()
    with pytest.raises(RuntimeError, match="the job crashes"), hf_zero_stream.HostStates(tmp_path, job="a") as states:
        assert states.load(model, optimizer=optimizer) is None
        step(model, optimizer)
        states.save(model, optimizer=optimizer, data=[1])
        hf_zero_stream.save_state(model, tmp_path / "shared", optimizer=optimizer, data=["shared"])
        step(model, optimizer)
        raise RuntimeError("the job crashes")
    step_again, _ = again = make()
    with hf_zero_stream.HostStates(tmp_path, job="b") as other:
        assert other.load(step_again, optimizer=again[1]) is None
    with hf_zero_stream.HostStates(tmp_path, job="a") as states:
        resumed = states.load(step_again, tmp_path / "shared", optimizer=again[1])
        assert resumed is not None and resumed.data == [1]
        step(*again)
        assert torch.equal(step_again.weight, model.weight)
        hf_zero_stream.save_state(step_again, tmp_path / "shared", optimizer=again[1], data=["newer"])
        resumed = states.load(step_again, tmp_path / "shared", optimizer=again[1])
        assert resumed is not None and resumed.data == ["newer"]
    assert [path.name for path in tmp_path.iterdir()] == ["shared"]
