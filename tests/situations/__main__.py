"""``python -m tests.situations``: draw situations, and try each of them beside stock.

Examples:
    python -m tests.situations --minutes 60 --seed 7 --log situations.jsonl --scripts findings
    python -m tests.situations --one home=zero3,optimizer=none_entry
    python -m tests.situations --only place=bucket
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.cluster import ENVIRONMENT


# Read when the ranks' fork server starts.
for _name, _value in {**ENVIRONMENT, "PYTHONWARNINGS": "ignore", "HF_ZERO_STREAM_PROGRESS": "false"}.items():
    os.environ.setdefault(_name, _value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.situations", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same situations")
    parser.add_argument("--one", action="append", help="try this situation, as axis=value,axis=value, and no others")
    parser.add_argument("--only", default="", help="values that every situation must have, as axis=value,axis=value")
    parser.add_argument("--shrink", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--log", type=Path, help="append each situation and what was found to this file")
    parser.add_argument("--scripts", type=Path, help="write a small script for each finding into this folder")
    return parser


def main() -> int:
    arguments = _parser().parse_args()
    # After the environment is set, and not for --help.
    from tests.situations.axes import Situation
    from tests.situations.hosts import Hosts
    from tests.situations.models import make
    from tests.situations.places import Place
    from tests.situations.script import module_of, write_script
    from tests.situations.trial import Trial, shrunk

    source = random.Random(arguments.seed)
    end = time.monotonic() + 60 * arguments.minutes
    wanted = dict(part.split("=") for part in arguments.only.split(",") if part)
    counts = {"tried": 0, "findings": 0, "stock failed": 0, "refused": 0}
    known: set[tuple[str, ...]] = set()
    with tempfile.TemporaryDirectory(prefix="situations-") as temporary:
        folder = Path(temporary)
        make(folder / "checkpoints")

        def try_one(situation: Any) -> Trial:
            return module_of(situation).trial(situation, folder / "trial", folder / "checkpoints")

        def parse(text: str) -> Any:
            of_places = Hosts if text.startswith("place=hosts") else Place
            return (of_places if text.startswith("place=") else Situation).parse(text)

        given = iter([parse(text) for text in arguments.one or ()])
        while time.monotonic() < end:
            kind = source.choice({None: [Situation, Place, Hosts], "hosts": [Hosts]}.get(wanted.get("place"), [Place]))
            situation = next(given, None) if arguments.one else kind.draw(source)
            if situation is None:
                break
            if any(getattr(situation, name, None) != value for name, value in wanted.items()):
                continue
            start = time.monotonic()
            result = try_one(situation)
            counts["tried"] += 1
            counts["stock failed"] += bool(result.stock_failed)
            counts["refused"] += bool(result.refused)
            entry = {"situation": str(situation), "seconds": round(time.monotonic() - start, 1)}
            entry |= {"stock failed": result.stock_failed[:300], "refused": result.refused[:300]}
            if result.stock_failed:
                entry["ours there"] = result.ours_there[:600]
            if result.findings:
                counts["findings"] += 1
                kinds = {finding.kind for finding in result.findings}
                simple = shrunk(situation, kinds, try_one) if arguments.shrink else situation
                entry |= {"simplest": str(simple), "findings": [vars(finding) for finding in result.findings]}
                key = (str(simple), *sorted(kinds))
                if arguments.scripts and key not in known:
                    write_script(arguments.scripts, len(known), simple, sorted(kinds))
                known.add(key)
            if arguments.log:
                with arguments.log.open("a") as log:
                    print(json.dumps(entry), file=log)
            print(json.dumps(entry)[:2500], file=sys.stderr, flush=True)
    print(", ".join(f"{name}: {count}" for name, count in counts.items()) + f"; seed {arguments.seed}")
    return 1 if counts["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
