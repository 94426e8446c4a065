"""A process group that stands for a world that is not there: one rank of it, in this process, for a plan.

It communicates with nobody. Device meshes and FSDP2 ask it for its rank and its size, which is all that a plan needs.
A real process group may be there already: only the thread that makes the fake sees it, and no other thread's
collectives are touched.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import debug
from torch.testing._internal.distributed.fake_pg import FakeStore

from ...errors import require_names


require_names("torch", distributed_c10d, "_World", "_world", "_update_default_pg", "_unregister_process_group")
require_names("torch", debug, "_clear_sharding_prop_cache")

_FIRST_NUMBER = 1 << 40
"""torch names groups by their number, in a table of the whole process; no real group comes this far."""

_making = threading.Lock()


@contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[None]:
    """Inside, this thread is rank `rank` of a default process group of `world_size` ranks."""
    with _making:
        own, fake = distributed_c10d._world, _World()
        distributed_c10d._world = _Switch(own, fake)
        excepthook = sys.excepthook
        debug._clear_sharding_prop_cache()
        try:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
            yield
        finally:
            # Torch takes device meshes of other ranks for equal, and would give this one's out of its cache.
            debug._clear_sharding_prop_cache()
            sys.excepthook = excepthook
            distributed_c10d._world = own
            distributed_c10d._update_default_pg(own.default_pg)
            # Not destroy_process_group(): it clears the whole table.
            for group in fake.pg_names:
                distributed_c10d._unregister_process_group(group.group_name)


class _World(distributed_c10d._World):
    """c10d's record of its process groups; torch's own keeps most of it in globals of the module."""

    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    tags_to_pg: Any = None
    pg_to_tag: Any = None
    group_count: Any = _FIRST_NUMBER

    def __init__(self) -> None:
        super().__init__()
        self.pg_map, self.pg_names, self.pg_group_ranks, self.pg_backend_config = {}, {}, {}, {}
        self.tags_to_pg, self.pg_to_tag = {}, {}


class _Switch:
    """The fake's record in the thread that makes this object, the process's own in all others."""

    def __init__(self, own: Any, fake: Any) -> None:
        vars(self).update(_own=own, _fake=fake, _thread=threading.get_ident())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._current(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._current(), name, value)

    def _current(self) -> Any:
        return self._fake if threading.get_ident() == self._thread else self._own
