"""``python -m tests.sweep``: see how every model type loads.

Examples:
    python -m tests.sweep --types qwen3_moe,clip,t5
    python -m tests.sweep --destinations zero3x2,zero3x3/5 --dtypes fp32,bf16 --stock --csv docs/models.csv
    python -m tests.sweep --destinations fsdp2,tp2,replicate2-fsdp2,fsdp2-tp2-ep2 --types mixtral --json sweep.json
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from tests.support.cluster import ENVIRONMENT


# Read when the ranks' fork server starts.
for _name, _value in {**ENVIRONMENT, "PYTHONWARNINGS": "ignore"}.items():
    os.environ.setdefault(_name, _value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__.splitlines()[0])
    parser.add_argument("--types", help="model types, separated by commas, each optionally type:Class; default: all")
    parser.add_argument(
        "--destinations",
        default="zero3x2",
        help="zero3xN for ZeRO-3 on N ranks; filesxN, with weights that stay in files; fsdpN, tpN, epN, replicateN "
        "joined by - for what distributed_config= shards; drawnxN and acceleratexN for random numbers alone; NAME/5 "
        "takes every fifth model",
    )
    parser.add_argument("--dtypes", default="fp32", help="fp32, bf16, fp16; fp32-bf16 loads fp32 files in bf16")
    parser.add_argument("--stock", action=argparse.BooleanOptionalAction, help="also what stock does there")
    parser.add_argument("--jobs", type=int, default=1, help="batches side by side, each with its own ranks")
    parser.add_argument("--batch", type=int, default=20, help="models that share the start of their ranks")
    parser.add_argument("--folder", type=Path, help="keep the tiny checkpoints there, and use those already there")
    parser.add_argument("--json", type=Path, help="write everything that was found to this file")
    parser.add_argument(
        "--csv", type=Path, help="write the table to this file, and its summary into the page (.md) beside it, if any"
    )
    return parser


def main() -> int:
    arguments = _parser().parse_args()
    # After the environment is set, and not for --help.
    import deepspeed
    import torch
    import transformers

    from tests.sweep.destinations import Destination
    from tests.sweep.report import counts, failures
    from tests.sweep.run import sweep
    from tests.sweep.tables import page, table
    from tests.sweep.tiny import all_types

    with tempfile.TemporaryDirectory(prefix="sweep-") as temporary:
        result = sweep(
            arguments.types.split(",") if arguments.types else all_types(),
            arguments.folder or Path(temporary),
            destinations=[Destination.parse(text) for text in arguments.destinations.split(",")],
            dtypes=arguments.dtypes.split(","),
            stock=bool(arguments.stock),
            jobs=arguments.jobs,
            batch=arguments.batch,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(result.to_dict(), indent=1) + "\n")
    if arguments.csv:
        versions = (
            f"transformers {transformers.__version__}, DeepSpeed {deepspeed.__version__}, "
            f"torch {torch.__version__.partition('+')[0]}"
        )
        text = table(result, arguments.csv.read_text() if arguments.csv.exists() else "")
        arguments.csv.parent.mkdir(parents=True, exist_ok=True)
        arguments.csv.write_text(text)
        beside = arguments.csv.with_suffix(".md")
        if beside.exists():
            beside.write_text(page(result, versions, text, beside.read_text()))
    bad = failures(result)
    print("\n".join(bad), end="\n" if bad else "")
    print(counts(result))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
