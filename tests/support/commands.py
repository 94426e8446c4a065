"""Run the commands that documentation shows, exactly as shown, in real processes."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from tests.support.cluster import ENVIRONMENT, ROOT, free_port


LAUNCHERS = ("accelerate", "torchrun", "deepspeed")
ASSIGNMENT = re.compile(r"[A-Z_]+=")
FSDP2_ON_CPU = ROOT / "tests" / "support" / "fsdp2_on_cpu"


def command_environment(search_path: Sequence[Path] = ()) -> dict[str, str]:
    """The environment of a user who has activated this Python's environment and has no GPU.

    Python looks for modules in the folders of `search_path` first.
    """
    return {
        **os.environ,
        **ENVIRONMENT,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore",
        # Where the package is not installed; torchrun adds only the script's own folder.
        "PYTHONPATH": os.pathsep.join(
            [*map(str, search_path), *filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])]
        ),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }


def run_command(
    command: str,
    folder: Path,
    *,
    replace: Mapping[str, str] = {},
    extra: Sequence[str] = (),
    search_path: Sequence[Path] = (),
) -> str:
    """Run one documented command; returns what it printed, and fails with that if it failed.

    The command's paths hold from the root of the repository; `folder` has links to what is in there, so that files
    it writes do not end up in the repository.
    """
    link_repository(folder)
    words = [replace.get(word, word) for word in shlex.split(command)] + list(extra)
    variables = dict(word.split("=", 1) for word in takewhile(ASSIGNMENT.match, words))
    words = words[len(variables) :]
    first = next((place for place, word in enumerate(words) if word in LAUNCHERS), 0)
    if words[first : first + 2] == ["accelerate", "launch"]:
        words[first + 2 : first + 2] = ["--main_process_port", "0"]  # other tests may be launching at the same time
    elif words[first] == "torchrun":
        words[first + 1 : first + 1] = ["--standalone"]
    elif words[first] == "deepspeed":
        words[first + 1 : first + 1] = ["--master_port", str(free_port())]
    done = subprocess.run(
        words,
        cwd=folder,
        env={**command_environment(search_path), **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}"
    return done.stdout


def run_to_its_end(command: str, folder: Path, end: str, **kwargs: Any) -> str:
    """What `command` prints. Once it has printed `end` it may abort, as Python ends.

    That was seen in runs of stock's. Most likely a thread of gloo's was the last to hold a tensor, and let go of it
    when Python's lock was gone. In trials that make such a wait likely, 21 of 70 ranks aborted after DeepSpeed's own
    ZeRO-3 load, and none of 170 after a streamed one.
    """
    try:
        return run_command(command, folder, **kwargs)
    except AssertionError as error:
        printed = str(error)
        if "terminate called without an active exception" not in printed or end not in printed:
            raise
        return printed


def link_repository(folder: Path) -> None:
    """Give `folder` the repository's folders, as links."""
    for name in ("benchmarks", "examples", "hf_zero_stream"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name, target_is_directory=True)


def documented_commands(text: str) -> list[str]:
    """The indented commands of a docstring; lines that end in a backslash are joined."""
    joined = re.sub(r"\\\n\s*", "", text)
    return [line.strip() for line in joined.splitlines() if re.match(r" {4}(python|accelerate|torchrun) ", line)]


def losses(output: str) -> list[str]:
    """The losses that an example printed, one per step."""
    return re.findall(r"^step \d+: loss (\S+)$", output, re.MULTILINE)
