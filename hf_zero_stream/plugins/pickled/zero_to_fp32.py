#!/usr/bin/env python
"""Writes the fp32 values of a training state of hf_zero_stream as safetensors, by `hf-zero-stream convert`."""

import argparse
import subprocess
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint_dir", type=Path)
    parser.add_argument("output_dir")
    parser.add_argument("-t", "--tag", help="the name of the state, such as global_step1; default: the newest")
    parser.add_argument("--max_shard_size", default="5GB")
    parser.add_argument("--safe_serialization", action="store_true", help="as it always is")
    given = parser.parse_args()
    place = given.checkpoint_dir / (given.tag or (given.checkpoint_dir / "latest").read_text().strip())
    if (place / "latest").is_file():  # the state lies in the folder of a tag that the user gave
        place /= (place / "latest").read_text().strip()
    command = [sys.executable, "-m", "hf_zero_stream", "convert", str(place), given.output_dir]
    return subprocess.call([*command, "--max-shard-size", given.max_shard_size])


if __name__ == "__main__":
    sys.exit(main())
