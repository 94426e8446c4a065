"""``python -m hf_zero_stream.run train.py``: run a script or a module inside ``streaming()``, its code unchanged.

Works under every launcher that starts modules::

    python -m hf_zero_stream.run train.py --its own --arguments
    accelerate launch --config_file zero3.yaml -m hf_zero_stream.run train.py --its own --arguments
    torchrun --nproc_per_node 8 -m hf_zero_stream.run -m package.train --its own --arguments
    deepspeed --module hf_zero_stream.run train.py --its own --arguments

The block is that of the whole process: all threads are in it. Arguments, exit code, ``sys.path`` and tracebacks are
those of ``python train.py``. Settings come from the environment and from the DeepSpeed config.

Nothing is imported before the script asks for it. So a script may still set environment variables that torch,
transformers or huggingface_hub read at their import. The block is entered at the first call of one of the functions
in :data:`ENTRANCES`.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import runpy
import sys
import threading
import zipfile
from collections.abc import Callable, Sequence
from importlib.machinery import BuiltinImporter, SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any

from .imports import Watch


__all__ = ["ENTRANCES", "main", "watch"]

ENTRANCES = (
    ("transformers.modeling_utils", "PreTrainedModel", "from_pretrained"),
    ("transformers.modeling_utils", "PreTrainedModel", "save_pretrained"),
    ("transformers.trainer", "Trainer", "__init__"),
    ("accelerate.accelerator", "Accelerator", "__init__"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", "__init__"),
)
"""(module, class, function): their first calls enter the block. Every load, save and training passes one of them."""

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
    _refuse_wrong_settings()
    sys.argv[:] = [target, *own, *rest]
    watch()
    main_module = sys.modules["__main__"] = ModuleType("__main__")
    vars(main_module).update(__builtins__=builtins)
    try:
        _run(target, vars(main_module), is_module=is_module)
    except BaseException:
        # Only now: the script must find Python's own hook, and may have put another in its place.
        sys.excepthook = functools.partial(_excepthook, sys.excepthook)
        raise


def _refuse_wrong_settings() -> None:
    """End the process if the environment has a setting that no load could use."""
    from .config import values_in
    from .errors import ConfigError

    try:
        values_in()
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


_entering = threading.RLock()


def _enter() -> None:
    with _entering:
        from .context import enter_for_process

        enter_for_process()


def watch() -> None:
    """Have the first call of one of :data:`ENTRANCES` enter the block, whether it has been imported or will be."""
    modules = {module for module, _, _ in ENTRANCES}
    Watch(modules, _put_entrances).__enter__()
    for module in modules & set(sys.modules):
        _put_entrances(sys.modules[module])


def _put_entrances(module: ModuleType) -> None:
    for name, owner, function in ENTRANCES:
        if name == module.__name__ and function in vars(getattr(module, owner, object)):
            _put_entrance(getattr(module, owner), function)


def _put_entrance(owner: type, name: str) -> None:
    """Make the first call of ``owner.name`` enter the block; `streaming()`'s own replacement then stands there."""
    found = vars(owner)[name]
    is_class_method = isinstance(found, classmethod)
    original: Callable[..., Any] = found.__func__ if is_class_method else found
    later: Any = None

    @functools.wraps(original)
    def entrance(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal later
        with _entering:  # another thread may be entering; it has to end first
            called = later
            if called is None:
                # Later calls are those of a method that was taken from the class before. But if somebody has put a
                # wrapper in its place, `streaming()` wraps that, and later calls come from inside.
                is_wrapped = vars(owner)[name] is not placed
                later = found
                if not is_wrapped:
                    setattr(owner, name, found)
                _enter()
                called = vars(owner)[name]
                later = found if is_wrapped else called
        return called.__get__(*((None, self) if is_class_method else (self,)))(*args, **kwargs)

    placed: Any = classmethod(entrance) if is_class_method else entrance
    setattr(owner, name, placed)


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
