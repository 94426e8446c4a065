"""python -m benchmarks.clients NAME FOLDER [--resume]"""

import argparse
import importlib
from pathlib import Path

from benchmarks.clients.common import MODULES


parser = argparse.ArgumentParser()
parser.add_argument("name", choices=MODULES)
parser.add_argument("folder", type=Path)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--streams", action="store_true", help="what Ray's workers are told")
settings = parser.parse_args()
client = importlib.import_module(f"benchmarks.clients.{MODULES[settings.name]}")
getattr(client, settings.name)(settings)
