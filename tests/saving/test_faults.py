"""Saves that fail or die.

- Saves that fail: the same error on all ranks, and what was there before is still there, whole.
- A sample of ``python -m tests.saving.crash``: saves that die, or whose disk fails, at their single steps.
"""

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import hf_zero_stream
from hf_zero_stream.errors import SaveError
from hf_zero_stream.saving.publication import UNFINISHED, Publication, finish_interrupted
from tests.saving.crash import FAULTS, make_checkpoints, trial_of_two_ranks, trials_of_one_rank
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.parity import ds_config, load_with
from tests.support.saving import SHARD_SIZE, contents, saves_with
from tests.support.zoo import Checkpoint


NAME = "qwen3_moe"


def streamed(checkpoint: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    return load_with("streamed", "AutoModelForCausalLM", checkpoint, ds_config(dtype), {})


def save_over(checkpoint: Path, folder: Path, fault: str) -> str:
    """Save once, then again with a fault on one rank, then once more; the error's text."""
    from hf_zero_stream.saving import files

    model = streamed(checkpoint)
    hf_zero_stream.save_pretrained(model, folder, max_shard_size=SHARD_SIZE)
    before = contents(folder)
    restore = inject(fault, files) if dist.get_rank() == 1 or fault.startswith("reserve") else lambda: None
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SaveError) as caught, saves_with(verify="full"):
        # Other bytes than before, so that a mixture would show.
        hf_zero_stream.save_pretrained(model, folder, max_shard_size=SHARD_SIZE, dtype=torch.float32)
    restore()
    dist.barrier()
    assert contents(folder) == before
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    dist.barrier()
    with saves_with(verify="full"):
        hf_zero_stream.save_pretrained(model, folder, max_shard_size=SHARD_SIZE, dtype=torch.float32)
    return str(caught.value)


def inject(fault: str, files: Any) -> Callable[[], None]:
    if fault == "reserve: no space":

        def no_space(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        original, files.os.posix_fallocate = os.posix_fallocate, no_space
        return lambda: setattr(os, "posix_fallocate", original)
    if fault == "write: no space":
        write = os.pwritev
        left = [3]

        def at_some_point(*args: Any) -> int:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(*args)

        os.pwritev = at_some_point
        return lambda: setattr(os, "pwritev", write)
    if fault == "a bit flips":
        put = files.ShardWriter.put

        def flipped(self: Any, shard: int, position: int, buffers: Any) -> None:
            first = bytearray(buffers[0])
            first[0] ^= 16
            put(self, shard, position, [memoryview(first), *buffers[1:]])

        files.ShardWriter.put = flipped
        return lambda: setattr(files.ShardWriter, "put", put)
    assert fault == "sync: i/o error"
    sync = os.fsync

    def broken(handle: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    os.fsync = broken
    return lambda: setattr(os, "fsync", sync)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("reserve: no space", ["cannot make a file of", "iB: No space left on device"]),
        ("write: no space", ["bytes", "No space left on device"]),
        ("a bit flips", ["bytes", "does not hold what was written"]),
        ("sync: i/o error", ["Input/output error"]),
    ],
)
def test_one_rank_cannot_write(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, fault: str, words: list[str]
) -> None:
    errors = run_ranks(3, save_over, zoo_checkpoint(NAME, torch.bfloat16), tmp_path / "saved", fault)
    for error in errors:
        for word in [*words, ".safetensors", "has not been touched"]:
            assert word in error
    rank = 0 if fault.startswith("reserve") else 1
    assert all(f"rank {rank}: " in error for number, error in enumerate(errors) if number != rank)


def save_with_a_death(checkpoint: Path, folder: Path) -> None:
    from hf_zero_stream.saving import files

    model = streamed(checkpoint)
    hf_zero_stream.save_pretrained(model, folder, max_shard_size=SHARD_SIZE)
    if dist.get_rank() == 1:
        files.ShardWriter.put = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    hf_zero_stream.save_pretrained(model, folder, max_shard_size=SHARD_SIZE, dtype=torch.float32)


@pytest.mark.plugin("watch")
def test_a_rank_is_killed(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    first, killed, last = run_ranks_expecting_errors(
        3, save_with_a_death, zoo_checkpoint(NAME, torch.bfloat16), folder, timeout=60
    )
    for survivor in (first, last):
        assert survivor.error_type == "PeerError" and "rank 1" in survivor.error_message
    tensors = [load_file(path) for path in folder.glob("*.safetensors")]
    assert {value.dtype for shard in tensors for value in shard.values()} == {torch.bfloat16}
    assert not any(name.startswith(UNFINISHED) for name in os.listdir(folder)), "the survivors should have cleaned up"


def save_to(checkpoint: Path, folder: Path) -> str:
    model = streamed(checkpoint)
    try:
        hf_zero_stream.save_pretrained(model, folder, max_shard_size=SHARD_SIZE)
    except SaveError as error:
        return str(error)
    return ""


def test_a_disk_that_is_really_full(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A file system of 64 KiB, where one can be mounted; nobody but root can, and the test above stands in for it."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], capture_output=True, check=False
    )
    if mounted.returncode:
        assert os.geteuid() != 0 or b"permi" in mounted.stderr or b"only root" in mounted.stderr
        return
    try:
        errors = run_ranks(2, save_to, zoo_checkpoint(NAME, torch.bfloat16), tmp_path / "saved")
        assert all("No space left on device" in error for error in errors)
        assert list((tmp_path / "saved").iterdir()) == []
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_it_may_be_read_from(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Saving over the checkpoint that the model came from, and that others have mapped, changes only the names."""
    (folder,) = run_ranks(1, save_over_its_own, zoo_checkpoint(NAME, torch.bfloat16), tmp_path / "own")
    assert folder == "same"


def save_over_its_own(checkpoint: Path, folder: Path) -> str:
    from safetensors import safe_open

    shutil.copytree(checkpoint, folder)
    mapped = {path: safe_open(path, "pt") for path in folder.glob("*.safetensors")}
    before = {path: load_file(path) for path in mapped}
    hf_zero_stream.save_pretrained(streamed(folder), folder, dtype=torch.float32)
    same = all(
        torch.equal(mapped[path].get_tensor(name), value) for path in mapped for name, value in before[path].items()
    )
    return "same" if same else "different"


def load_after_a_death(folder: Path) -> list[str]:
    """A save that died between the list of renames and the renames: its checkpoint is loaded."""
    model = streamed(folder)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return [str(param.flatten()[0].item()) for param in model.parameters()]


def test_loading_finishes_a_save(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "saved"
    shutil.copytree(zoo_checkpoint(NAME, torch.bfloat16), folder)
    dying = Publication.begin(folder)
    for path in folder.glob("*.safetensors"):
        tensors = {name: torch.full_like(value, 3) for name, value in load_file(path).items()}
        save_file(tensors, dying.temporary / path.name, metadata={"format": "pt"})
    shutil.copy(folder / "model.safetensors.index.json", dying.temporary)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace_lists_only(os.replace))
        with pytest.raises(SaveError, match="finishes it"):
            dying.commit("model.safetensors", "model.safetensors.index.json")
    dying.abandon()
    assert dying.temporary.exists(), "the list was written, so the save is not to be lost"
    assert set(run_ranks(2, load_after_a_death, folder)[0]) == {"3.0"}
    assert not dying.temporary.exists()


def replace_lists_only(original: Callable[..., None]) -> Callable[..., None]:
    def replace(source: Any, target: Any) -> None:
        if not str(target).endswith("renames.json"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        original(source, target)

    return replace


def finish(folder: Path) -> list[str]:
    dist.barrier()
    return finish_interrupted(folder)


def test_ranks_that_load_alone_finish_a_save_once(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come at the same time; each sees a folder that is complete."""
    for number in range(5):
        dying = Publication.begin(tmp_path)
        names = [f"model-{shard:05}-of-00200.safetensors" for shard in range(1, 201)]
        for name in names:
            (dying.temporary / name).write_text(str(number))
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace_lists_only(os.replace))
            with pytest.raises(SaveError, match="finishes it"):
                dying.commit("model.safetensors", "model.safetensors.index.json")
        dying.abandon()
        assert sorted(map(len, run_ranks(4, finish, tmp_path))) == [0, 0, 0, 200]
        assert contents(tmp_path) == {name: str(number).encode() for name in names}


def test_what_a_save_has_left_is_finished_or_removed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("old")
    dead = tmp_path / f"{UNFINISHED}dead"
    dead.mkdir()
    (dead / "model.safetensors").write_text("half")
    again = Publication.begin(tmp_path)
    assert not dead.exists() and (tmp_path / "config.json").read_text() == "old"
    (again.temporary / "config.json").write_text("new")
    again.commit("model.safetensors", "model.safetensors.index.json")
    assert contents(tmp_path) == {"config.json": b"new"}
    assert finish_interrupted(tmp_path) == []


DYING = """
import sys
from pathlib import Path
from hf_zero_stream.saving.publication import Publication
publication = Publication.begin(Path(sys.argv[1]))
print(publication.temporary.name, flush=True)
sys.stdin.read()
"""


def test_a_save_removes_what_dead_ones_have_left_and_no_living_one(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DYING, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        name = other.stdout.readline().strip()
        Publication.begin(tmp_path).abandon()
        assert os.listdir(tmp_path) == [name]
        other.kill()
        other.wait()
    assert os.listdir(tmp_path) == [name]
    Publication.begin(tmp_path).abandon()
    assert os.listdir(tmp_path) == []


Checkpoints = tuple[Path, Path, dict[str, bytes]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return make_checkpoints(tmp_path_factory.mktemp("crash"))


@pytest.mark.parametrize(
    ("fault", "stride"),
    [
        pytest.param("killed", 1, marks=pytest.mark.slow),
        ("killed", 4),
        ("no space", 3),
        pytest.param("i/o error", 4, marks=pytest.mark.slow),
    ],
)
def test_one_rank(checkpoints: Checkpoints, fault: str, stride: int) -> None:
    old, checkpoint, new = checkpoints
    found = trials_of_one_rank(checkpoint, old, new, [fault], stride)
    # There are steps before anything has a final name, steps in between, and steps after.
    assert found.keys() >= {f"{fault}: old", f"{fault}: finished", f"{fault}: new"}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("rank", "step"), [(0, 1), (0, 16), (0, 35), (1, 0), (1, 5)])
def test_one_of_two_ranks(cluster: None, checkpoints: Checkpoints, rank: int, step: int, fault: str) -> None:
    old, checkpoint, new = checkpoints
    assert trial_of_two_ranks(checkpoint, old, new, rank, step, fault).startswith(fault)
