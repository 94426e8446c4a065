"""``python -m hf_zero_stream.run train.py``: run a script or a module inside ``streaming()``, its code unchanged.

Works under every launcher that starts modules::

    python -m hf_zero_stream.run train.py --its own --arguments
    accelerate launch --config_file zero3.yaml -m hf_zero_stream.run train.py --its own --arguments
    torchrun --nproc_per_node 8 -m hf_zero_stream.run -m package.train --its own --arguments
    deepspeed --module hf_zero_stream.run train.py --its own --arguments

This process becomes ``python train.py``, in the way of ``hf-zero-stream run`` (:mod:`.prefix`), but begins the block
at once: also without other ranks, and before it imports anything.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from .errors import ConfigError
from .prefix import environment
from .settings.config import check_environment


USAGE = """\
usage: python -m hf_zero_stream.run SCRIPT [ARGUMENT ...]
       python -m hf_zero_stream.run -m MODULE [ARGUMENT ...]

Run a Python script or module inside hf_zero_stream.streaming(): each rank reads and writes only its own bytes of
checkpoints. Settings come from environment variables, HF_ZERO_STREAM_<NAME>, and from the section "hf_zero_stream" of
the DeepSpeed config.
"""


def main(arguments: Sequence[str]) -> None:
    """Become the Python that runs what the command line's `arguments` name; else end with a message and a code."""
    # deepspeed's launcher puts its own option in front of what it runs; it is meant for the script.
    rest = list(arguments)
    own = [rest.pop(0)] if rest and rest[0].startswith(("--local_rank=", "--local-rank=")) else []
    is_module = rest[:1] == ["-m"]
    target, rest = rest[: is_module + 1], rest[is_module + 1 :]
    if len(target) <= is_module or (target[-1].startswith("-") and target != ["-"]):
        is_help = target[-1:] in (["-h"], ["--help"])
        print(USAGE, file=sys.stdout if is_help else sys.stderr, end="")
        sys.exit(0 if is_help else 2)
    if sys.flags.ignore_environment or sys.flags.no_site:
        _refuse("expected a Python that reads PYTHONPATH, and imports sitecustomize; leave -E, -I and -S out")
    try:
        check_environment()
    except ConfigError as error:
        _refuse(str(error))
    called = sys.orig_argv[1 : len(sys.orig_argv) - len(arguments)]
    options = [each for each in called if each not in ("-m", __spec__.name)]
    command = [sys.executable, *options, *target, *own, *rest]
    os.execve(sys.executable, command, environment(os.environ, at_once=True))


def _refuse(why: str) -> None:
    print(f"hf_zero_stream.run: {why}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
