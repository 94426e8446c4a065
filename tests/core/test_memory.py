"""Growth of anonymous memory counts what was touched, not files, and the sampler ends with its context."""

import mmap
import threading
import time

import pytest

from hf_zero_stream.reports import measures
from hf_zero_stream.reports.measures import AnonymousMemory


MIB = 2**20
# The kernel keeps the count per core and may be late by so much.
SLACK = 4 * MIB


def anonymous_mapping(nbytes):
    """Memory that goes back to the system as soon as it is closed."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def touch(mapping):
    for offset in range(0, len(mapping), mmap.PAGESIZE):
        mapping[offset] = 1


def samplers():
    return [thread for thread in threading.enumerate() if thread.name == "hf_zero_stream-memory"]


def test_counts_touched_memory_and_keeps_the_peak():
    with AnonymousMemory() as watch:
        with anonymous_mapping(64 * MIB) as mapping:
            assert watch.sample() < SLACK
            touch(mapping)
            assert watch.sample() >= 64 * MIB - SLACK
        assert watch.sample() < SLACK
    assert 64 * MIB - SLACK <= watch.growth_peak < 64 * MIB + SLACK


def test_thread_sees_a_peak_without_being_asked():
    with AnonymousMemory() as watch:
        with anonymous_mapping(64 * MIB) as mapping:
            touch(mapping)
            deadline = time.monotonic() + 60
            while watch.growth_peak < 64 * MIB - SLACK and time.monotonic() < deadline:
                time.sleep(0.002)
    assert watch.growth_peak >= 64 * MIB - SLACK


def test_mapped_file_is_not_counted(tmp_path):
    path = tmp_path / "shard"
    path.write_bytes(bytes(64 * MIB))
    with open(path, "rb") as file, AnonymousMemory() as watch:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
            assert sum(mapping[offset] for offset in range(0, len(mapping), mmap.PAGESIZE)) == 0
            watch.sample()
    assert watch.growth_peak < SLACK


def test_sampler_ends_with_the_context_also_after_an_error():
    with pytest.raises(ZeroDivisionError):
        with AnonymousMemory() as watch:
            assert len(samplers()) == 1
            1 / 0
    assert samplers() == []
    assert watch.sample() == 0


def test_can_be_entered_again():
    watch = AnonymousMemory()
    with watch, anonymous_mapping(64 * MIB) as mapping:
        touch(mapping)
        watch.sample()
    with watch:
        pass
    assert watch.growth_peak < SLACK


def test_is_zero_where_the_system_does_not_tell(monkeypatch):
    monkeypatch.setattr(measures.psutil, "LINUX", False)
    with AnonymousMemory() as watch, anonymous_mapping(64 * MIB) as mapping:
        touch(mapping)
        assert watch.sample() == 0
    assert watch.growth_peak == 0
