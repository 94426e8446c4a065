"""Who shares a host is asked of the ranks; what launchers announce is for a process that has nobody to ask."""

import pytest
import torch.distributed as dist

from hf_zero_stream.ranks.coordinator import Coordinator
from hf_zero_stream.ranks.presence import Location, Presence, Topology
from hf_zero_stream.settings.config import LOCAL_RANKS, LOCAL_SIZES, announced_local_rank, announced_local_size
from tests.support.cluster import run_ranks
from tests.support.hosts import move_to_host


@pytest.mark.parametrize("name", LOCAL_SIZES)
def test_launchers_say_how_many_ranks_a_host_has(name: str) -> None:
    assert announced_local_size({}) == 1
    assert announced_local_size({name: "8"}) == 8
    assert announced_local_size({name: "8(x3)"}) == 8


@pytest.mark.parametrize("name", LOCAL_RANKS)
def test_launchers_number_the_ranks_of_a_host(name: str) -> None:
    assert announced_local_rank({}) == 0
    assert announced_local_rank({name: "5"}) == 5


def test_torch_s_launchers_come_before_those_around_them() -> None:
    """As torchrun in a batch script of Slurm's."""
    environ = {"SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "1", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    assert (announced_local_rank(environ), announced_local_size(environ)) == (3, 4)


@pytest.mark.parametrize(("hosts", "position", "first"), [("aabb", 1, 2), ("abab", 1, 1), ("abcd", 0, 3)])
def test_however_ranks_are_numbered(hosts: str, position: int, first: int) -> None:
    found = Topology(hosts, "xxxy" if hosts == "abcd" else "xxxx", 3)
    assert (found.position, found.ranks_of_host[0]) == (position, first)
    assert found.sharing_cores == (1 if hosts == "abcd" else 4)


def test_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = Topology.announced(3, 4)
    assert found.ranks_of_host == [2, 3] and found.position == 1 and found.sharing_cores == 2


def asked() -> tuple[list[int], int, bool]:
    """Ranks on two hosts, one of which has two containers with networks of their own."""
    rank = dist.get_rank()
    move_to_host("abab"[rank])
    real = Location.here
    if rank == 3:
        Location.here = classmethod(lambda cls, *args: real(*args)._replace(network="another"))  # type: ignore[method-assign]
    coordinator = Coordinator.of_default_group()
    with coordinator.watched():
        found = coordinator.topology
        presence = Presence.in_default_group()
        presence.topology()
        networks = {presence._locations[other].network for other in found.ranks_of_host}
        lives = [presence.is_alive(other) for other in found.ranks_of_host]
        coordinator.agree()
        assert all(alive is not False for alive in lives)
    return found.ranks_of_host, found.sharing_cores, len(networks) == 1


def test_ranks_are_asked(cluster: None) -> None:
    assert run_ranks(4, asked) == [([0, 2], 4, True), ([1, 3], 4, False), ([0, 2], 4, True), ([1, 3], 4, False)]
