"""Load the modules that DeepSpeed compiles at their first use, after a compiler that was killed too.

    python -m tests.support.extensions                 # all that tests need, as `make test` does before the first
    python -m tests.support.extensions AsyncIOBuilder  # these alone

Torch leaves a lock file while it compiles, and every later process waits without end for it to go. If the compiler was
killed, nobody removes it: that is done here. A lock that a process has open stays. Its owner, which may be a rank of
another run, would fail when it comes to remove it.
"""

import fcntl
import os
import sys
from pathlib import Path
from typing import Any

from hf_zero_stream.extensions import stale_locks


BUILDERS = ("ShareMemCommBuilder", "AsyncIOBuilder", "CPUAdamBuilder", "FusedAdamBuilder", "PinMemoryBuilder")


def load_extension(builder: str) -> Any:
    """Compile, the first time, and load what DeepSpeed's class of this name builds."""
    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    root.mkdir(parents=True, exist_ok=True)
    with open(root / "tests.flock", "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        for left in stale_locks():
            left.unlink()
        return get_accelerator().create_op_builder(builder).load(verbose=False)


def compile_extension(builder: str) -> None:
    """In a process that ends after that, so that whoever waits for it loads nothing."""
    load_extension(builder)


def compile_all() -> None:
    """Compile what tests need and can be compiled here; elsewhere the tests say what they lack."""
    from deepspeed.accelerator import get_accelerator

    for name in BUILDERS:
        builder = get_accelerator().create_op_builder(name)
        if builder is None or not builder.is_compatible(verbose=False):
            print(f"DeepSpeed's {name} cannot be compiled here: tests that need it are skipped, or fail.", flush=True)
            continue
        print(f"Compiling DeepSpeed's {builder.name}, once; that may take minutes", flush=True)
        try:
            load_extension(name)
        except Exception as error:  # without a compiler, for instance
            print(f"That failed, and tests that need it will say so: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    for chosen in sys.argv[1:]:
        load_extension(chosen)
    if not sys.argv[1:]:
        compile_all()
