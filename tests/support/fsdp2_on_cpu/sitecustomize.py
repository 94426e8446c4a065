"""With this folder on PYTHONPATH, processes that ``accelerate launch`` starts for FSDP train on CPUs, over gloo.

accelerate has FSDP on accelerators only. So it is told that its ranks are those of one; the process group, the device
and all that FSDP2 does stay those of a CPU. Python imports a module of this name when it starts: neither the config,
nor the launcher, nor the script knows of it.
"""

import os
from typing import Any


def _replace_init() -> None:
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    original = PartialState.__init__

    def init(self: PartialState, cpu: bool = True, **kwargs: Any) -> None:
        original(self, True, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = init


if os.environ.get("ACCELERATE_USE_FSDP") == "true" and "RANK" in os.environ:
    _replace_init()
