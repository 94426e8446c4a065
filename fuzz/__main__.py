"""``python -m fuzz TARGET [options of libFuzzer] [folders]``: see README.md."""

from __future__ import annotations

import hashlib
import shlex
import sys
from pathlib import Path

import atheris


with atheris.instrument_imports(
    include=[
        "hf_zero_stream.checkpoint",
        "hf_zero_stream.sources",
        "hf_zero_stream.plugins.pickled",
        "hf_zero_stream.plugins.remote",
    ],
    enable_loader_override=False,
):
    import hf_zero_stream.checkpoint.format
    import hf_zero_stream.checkpoint.formats
    import hf_zero_stream.plugins.pickled.distcp
    import hf_zero_stream.plugins.pickled.pickles
    import hf_zero_stream.plugins.pickled.torch_files
    import hf_zero_stream.plugins.pickled.torch_metadata
    import hf_zero_stream.plugins.pickled.torch_objects
    import hf_zero_stream.plugins.pickled.torch_zip
    import hf_zero_stream.plugins.pickled.zero_folder
    import hf_zero_stream.plugins.remote.small_files  # noqa: F401


from .corpus import unpack
from .pickled import OF_PICKLED
from .server import OF_REMOTE
from .targets import TARGETS


ALL = TARGETS | OF_PICKLED | OF_REMOTE


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in ALL:
        sys.exit(f"usage: python -m fuzz {{{','.join(ALL)}}} [-runs=N] [other options of libFuzzer] [folders]")
    _, name, *arguments = sys.argv
    read = ALL[name]
    kept = Path("build") / "fuzz" / name
    defaults = [
        "-max_len=4096",
        "-timeout=10",  # seconds for one input
        "-rss_limit_mb=2048",
        "-print_final_stats=1",
        f"-dict={Path(__file__).parent / 'json.dict'}",
        f"-artifact_prefix={kept}-",
    ]
    kept.mkdir(parents=True, exist_ok=True)
    given = any(not argument.startswith("-") for argument in arguments)
    unpacked = Path("build") / "fuzz" / "corpus" / name
    unpack(name, unpacked)
    folders = [] if given else [str(kept), str(unpacked)]

    def target(content: bytes) -> None:
        try:
            read(content)
        except BaseException:  # libFuzzer writes it too, but not if the alarm for its 10 seconds comes first
            Path(f"{kept}-crash-{hashlib.sha1(content).hexdigest()}").write_bytes(content)
            raise

    # To merge folders, libFuzzer has a shell run what it was called with, beginning with this.
    program = f"{shlex.quote(sys.executable)} -m fuzz {name}"
    atheris.Setup([program, *defaults, *arguments, *folders], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
