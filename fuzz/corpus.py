"""The inputs that fuzzing starts from, in one archive: seeds, and what fuzzing found that reaches something new.

``python -m fuzz.corpus TARGET [FOLDER]`` writes the seeds anew, and keeps what lies in a folder, as the only inputs of
a target that are no seeds.
"""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path


ARCHIVE = Path(__file__).parent / "corpus.zip"


def inputs_of(target: str) -> dict[str, bytes]:
    """A name -> an input of a target; what fuzzing found is named by its digest."""
    with zipfile.ZipFile(ARCHIVE) as archive:
        names = [name for name in archive.namelist() if name.startswith(f"{target}/")]
        return {name.removeprefix(f"{target}/"): archive.read(name) for name in names}


def unpack(target: str, folder: Path) -> None:
    """Write the inputs of a target into a folder, where libFuzzer reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in inputs_of(target).items():
        (folder / name).write_bytes(content)


def write(inputs: Mapping[str, bytes]) -> None:
    """Write the archive anew, of inputs by ``target/name``; the same inputs give the same bytes."""
    with zipfile.ZipFile(ARCHIVE, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(inputs):
            archive.writestr(zipfile.ZipInfo(name), inputs[name], zipfile.ZIP_DEFLATED)


def main() -> None:
    from .seeds import seeds_of_targets

    seeds = {
        f"{target}/{name}": data for target, of_one in seeds_of_targets().items() for name, data in of_one.items()
    }
    with zipfile.ZipFile(ARCHIVE) as archive:
        kept = {name: archive.read(name) for name in archive.namelist()}
    for target, folder in zip(sys.argv[1::2], map(Path, sys.argv[2::2]), strict=True):
        kept = {name: data for name, data in kept.items() if not name.startswith(f"{target}/")}
        kept |= {f"{target}/{path.name}": path.read_bytes() for path in folder.iterdir()}
    write(kept | seeds)


if __name__ == "__main__":
    main()
