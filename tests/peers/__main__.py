"""Run the suites in both arms, compare them, and print a table."""

import argparse
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from .arms import ARMS, HERE, ROOT, Run, run_arm
from .compare import faults_of
from .fetch import Unavailable, installed_to, source_of


CACHE = ROOT / ".peers"

MIXINS = ("test_fsdp_mixin.py", "test_tensor_parallel_mixin.py", "test_expert_parallel_mixin.py")


def mixins() -> tuple[Path, list[Path]]:
    """transformers' mixins, in a package with our driver; "tests" would be the name of ours too."""
    source, folder = source_of("transformers", CACHE) / "tests", CACHE / "mixins" / "peer_tests"
    lacking = [name for name in MIXINS if not (source / name).is_file()]
    if lacking:
        raise Unavailable(f"{source.parent.name}: its source distribution has no tests/{lacking[0]}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "__init__.py").touch()
    for path in [*(source / name for name in MIXINS), *(HERE / "suites" / "mixins").glob("*.py")]:
        shutil.copy(path, folder)
    return folder / "models.py", [folder.parent, installed_to(CACHE / "packages", "parameterized")]


def launches() -> tuple[Path, list[Path]]:
    """What accelerate and TRL install of scripts to launch."""
    return HERE / "suites" / "launches.py", []


def deepspeed() -> tuple[Path, list[Path]]:
    source = source_of("deepspeed", CACHE)
    if not (source / "tests" / "unit" / "checkpoint").is_dir():
        raise Unavailable(f"{source.name}: its source distribution has no tests/unit/checkpoint")
    raise Unavailable(f"{source.name} has tests/unit/checkpoint: this suite has to be written")


SUITES: dict[str, Callable[[], tuple[Path, list[Path]]]] = {
    "mixins": mixins,
    "launches": launches,
    "deepspeed": deepspeed,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description=__doc__)
    parser.add_argument("suites", nargs="*", default=list(SUITES), help=", ".join(SUITES))
    parser.add_argument("--only", default="", help="what pytest's -k takes")
    parser.add_argument("--timeout", type=float, default=7200, help="seconds for a suite in an arm")
    settings = parser.parse_args(arguments)
    CACHE.mkdir(exist_ok=True)
    lines, faults = [], []
    for name in settings.suites:
        try:
            tests, paths = SUITES[name]()
        except Unavailable as reason:
            lines.append(f"| {name} | skipped: {reason} | | |")
            continue
        runs: dict[str, Run] = {}
        for arm in ARMS:
            began = time.perf_counter()
            runs[arm] = run_arm(arm, tests, CACHE / "runs" / name / arm, paths, settings.only, settings.timeout)
            counts = Counter(result.outcome for result in runs[arm].results.values())
            shown = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
            did = ", ".join(f"{count} {what}" for what, count in sorted(runs[arm].events.items()))
            lines.append(f"| {name} | {arm}: {shown} | {did} | {time.perf_counter() - began:.0f} s |")
            print(lines[-1], flush=True)
        stock, ours = (runs[arm] for arm in ARMS)
        found = faults_of(stock.results, ours.results, {arm: runs[arm].events for arm in ARMS})
        lines.append(f"| {name} | differences: {len(found)} | | |")
        faults += [f"{name}: {fault}" for fault in found]
    print("\n".join(["", "| suite | tests | by us | time |", "|---|---|---|--:|", *lines, "", *faults]))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
