"""Free memory is that of the machine, or less: what the control groups leave that a process is in."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from hf_zero_stream.sources import page_cache


GIB = 2**30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 100 GiB of free memory, and a process of which nothing is said yet."""
    free = psutil.virtual_memory()._replace(available=100 * GIB)
    monkeypatch.setattr(page_cache.psutil, "virtual_memory", lambda: free)
    monkeypatch.setattr(page_cache, "_PROCESS", tmp_path / "proc")
    (tmp_path / "proc").mkdir()
    return tmp_path


def place_process(machine: Path, group: str, root: str, kind: str, options: str = "rw") -> Path:
    """Have the process be in a control group, of a tree that is mounted from `root` on; returns where."""
    mount = machine / "cgroup"
    mount.mkdir()
    controller = "memory" if kind == "cgroup" else ""
    (machine / "proc" / "cgroup").write_text(f"7:cpu:/elsewhere\n4:{controller}:{group}\n")
    others = f"26 1 0:5 / {machine} rw - ext4 /dev/sda rw\n"
    (machine / "proc" / "mountinfo").write_text(f"{others}33 26 0:30 {root} {mount} rw - {kind} cgroup {options}\n")
    return mount


def fill(group: Path, limit: object, used: int, cached: int, version: int = 2) -> None:
    """Write what the kernel says of a group: its limit, what it uses, and how much of that are cached pages."""
    group.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    total = "" if version == 2 else "total_"
    (group / names[0]).write_text(f"{limit}\n")
    (group / names[1]).write_text(f"{used}\n")
    stat = f"anon 1\nshmem {GIB}\n{total}inactive_file {cached // 2}\n{total}active_file {cached - cached // 2}\n"
    (group / "memory.stat").write_text(stat)


def test_a_machine_without_containers(machine: Path) -> None:
    assert page_cache.free_memory() == 100 * GIB


def test_version_2(machine: Path) -> None:
    """The tightest group on the way counts; pages of files are taken back, those of /dev/shm are not."""
    mount = place_process(machine, "/slurm/job_7/step_0", "/", "cgroup2")
    fill(mount / "slurm/job_7/step_0", "max", 3 * GIB, 0)
    fill(mount / "slurm/job_7", 8 * GIB, 5 * GIB, 2 * GIB)
    fill(mount / "slurm", 64 * GIB, 9 * GIB, 0)
    assert page_cache.free_memory() == 5 * GIB
    fill(mount / "slurm/job_7/step_0", 3 * GIB, 4 * GIB, 0)
    assert page_cache.free_memory() == 0


@pytest.mark.parametrize("group", ["/", "/docker/7f/inner", "/../../docker/7f"])
def test_inside_of_a_container(machine: Path, group: str) -> None:
    """It sees its own group at the mount, whatever the process is told of where it is."""
    mount = place_process(machine, group, "/docker/7f" if "inner" in group else "/", "cgroup2")
    fill(mount, 6 * GIB, GIB, 0)
    assert page_cache.free_memory() == 5 * GIB


@pytest.mark.parametrize("limit", [2 * GIB, 2**63 - 4096])
def test_version_1(machine: Path, limit: int) -> None:
    mount = place_process(machine, "/docker/7f", "/docker/7f", "cgroup", "rw,memory")
    fill(mount, limit, GIB, GIB // 2, version=1)
    assert page_cache.free_memory() == min(100 * GIB, limit - GIB // 2)


def test_groups_that_limit_no_memory(machine: Path) -> None:
    mount = place_process(machine, "/a", "/", "cgroup", "rw,cpu")
    fill(mount / "a", 1, 1, 0, version=1)
    assert page_cache.free_memory() == 100 * GIB
