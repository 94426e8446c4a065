"""``python -m hf_zero_stream.run train.py``: run a script or a module inside ``streaming()``, its code unchanged.

Works under every launcher that starts modules::

    python -m hf_zero_stream.run train.py --its own --arguments
    accelerate launch --config_file zero3.yaml -m hf_zero_stream.run train.py --its own --arguments
    torchrun --nproc_per_node 8 -m hf_zero_stream.run -m package.train --its own --arguments
    deepspeed --module hf_zero_stream.run train.py --its own --arguments

The block is that of the whole process: all threads are in it. Arguments, exit code, ``sys.path`` and tracebacks are
those of ``python train.py``. Settings come from the environment and from the DeepSpeed config.

Of other packages nothing is imported before the script asks for it. So a script may still set environment variables
that torch, transformers or huggingface_hub read at their import. Ranks make contact as soon as there is a process
group.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import runpy
import sys
import zipfile
from collections.abc import Callable, Sequence
from importlib.machinery import BuiltinImporter, SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any


USAGE = """\
usage: python -m hf_zero_stream.run SCRIPT [ARGUMENT ...]
       python -m hf_zero_stream.run -m MODULE [ARGUMENT ...]

Run a Python script or module inside hf_zero_stream.streaming(): each rank reads and writes only its own bytes of
checkpoints. Settings come from environment variables, HF_ZERO_STREAM_<NAME>, and from the section "hf_zero_stream" of
the DeepSpeed config.
"""


def main(arguments: Sequence[str]) -> None:
    """Run the script or module that the command line's `arguments` name; raises what it raises, ``SystemExit`` too."""
    # deepspeed's launcher puts its own option in front of what it runs; it is meant for the script.
    rest = list(arguments)
    own = [rest.pop(0)] if rest and rest[0].startswith(("--local_rank=", "--local-rank=")) else []
    is_module = rest[:1] == ["-m"]
    target, rest = "".join(rest[is_module : is_module + 1]), rest[is_module + 1 :]
    if not target or (target.startswith("-") and target != "-" and not is_module):
        is_help = target in ("-h", "--help")
        print(USAGE, file=sys.stdout if is_help else sys.stderr, end="")
        sys.exit(0 if is_help else 2)
    _enter()
    sys.argv[:] = [target, *own, *rest]
    main_module = sys.modules["__main__"] = ModuleType("__main__")
    vars(main_module).update(__builtins__=builtins)
    try:
        _run(target, vars(main_module), is_module=is_module)
    except BaseException:
        # Only now: the script must find Python's own hook, and may have put another in its place.
        sys.excepthook = functools.partial(_excepthook, sys.excepthook)
        raise


def _enter() -> None:
    """Enter the block, or end the process if the environment has a setting that no load could use."""
    from .bindings.streaming import enter_for_process
    from .errors import ConfigError

    try:
        enter_for_process()
    except ConfigError as error:
        print(f"hf_zero_stream.run: {error}", file=sys.stderr)
        sys.exit(2)


def _run(target: str, names: dict[str, Any], *, is_module: bool) -> None:
    path = os.path.abspath(target)
    if is_module:
        _run_module(target)
    elif target == "-":
        if not sys.flags.safe_path:
            sys.path[0] = ""
        names.update(__file__="<stdin>", __cached__=None, __loader__=BuiltinImporter)
        exec(compile(sys.stdin.buffer.read(), "<stdin>", "exec", dont_inherit=True), names)
    elif os.path.isdir(path) or zipfile.is_zipfile(path):
        sys.path[: 0 if sys.flags.safe_path else 1] = [path]
        _run_module("__main__", False)
    else:
        _run_file(path, names)


def _run_file(path: str, names: dict[str, Any]) -> None:
    """Run the source at the absolute `path`, with `names` for its globals, as ``python`` does."""
    if not sys.flags.safe_path:  # python -m has put the working directory there
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    names.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        sys.exit(2)
    exec(compile(source, path, "exec", dont_inherit=True), names)


# What the interpreter itself calls for `python -m`. The public functions of runpy take their `__main__` away at the
# end, before functions of atexit run, and end in another way where a module is not found.
_run_module: Callable[..., Any] = runpy._run_module_as_main  # type: ignore[attr-defined]


def _excepthook(
    shown_by: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Show an uncaught error as ``python train.py`` would: without our frames, and those of runpy that called them.

    A frame of ours that the script has called stays, with the script's frames before it.
    """
    while trace is not None and trace.tb_frame.f_code.co_filename != __file__:
        trace = trace.tb_next
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    shown_by(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    main(sys.argv[1:])
