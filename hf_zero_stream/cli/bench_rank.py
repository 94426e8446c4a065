"""The body of one rank of ``bench``: load once, and write the figures down. Started by torchrun.

python -m hf_zero_stream.cli.bench_rank ARM FOLDER CONFIG RESULTS
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
import transformers
from transformers.integrations import HfDeepSpeedConfig

from ..config import without_own_section
from ..destinations.deepspeed import machine, zero3
from ..loading.dry_load import model_class_of
from ..loading.integration import streaming
from ..reports.memory import AnonymousMemory


_FILE_PAGES = re.compile(rb"^RssFile:\s*(\d+) kB$", re.MULTILINE)


class MappedFiles:
    """A context in which the growth of this process's pages of mapped files is watched, in bytes."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._entry = self._peak = 0

    @property
    def growth_peak(self) -> int:
        return self._peak - self._entry

    def __enter__(self) -> MappedFiles:
        self._entry = self._peak = self._sample()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self._peak = max(self._peak, self._sample())

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            self._peak = max(self._peak, self._sample())

    def _sample(self) -> int:
        match = _FILE_PAGES.search(Path("/proc/self/status").read_bytes())
        return int(match[1]) * 1024 if match else 0


def measure(arm: str, folder: str, config: dict[str, Any]) -> dict[str, Any]:
    """Load with all ranks; returns this rank's figures."""
    import hf_zero_stream.destinations.deepspeed.partitioned
    import hf_zero_stream.loading.load  # noqa: F401 - or the first load would import it

    model_class, dtype = model_class_of(folder, {"trust_remote_code": False}), zero3.partition_dtype(config)
    # transformers finds ZeRO-3 as long as this object lives.
    ds_config = HfDeepSpeedConfig(without_own_section(config)) if arm == "stock" else None
    with AnonymousMemory() as memory, MappedFiles() as mapped:
        dist.barrier()
        start = time.perf_counter()
        if ds_config is not None:
            model = model_class.from_pretrained(folder, dtype=dtype)
        else:
            with streaming():
                model = model_class.from_pretrained(folder, dtype=dtype, ds_config=config)
        machine.synchronize()
        dist.barrier()
        seconds = time.perf_counter() - start
    report = getattr(model, "streaming_report", None)
    return {
        "seconds": seconds,
        "bytes_read": mapped.growth_peak if report is None else report.ranks[dist.get_rank()].bytes_read,
        "anonymous_growth_bytes": memory.growth_peak,
        "partition_bytes": machine.partition_bytes(model),
        "digest": machine.partition_digest(model),
    }


def main() -> None:
    arm, folder, config_file, results = sys.argv[1:]
    config = json.loads(Path(config_file).read_text())
    transformers.utils.logging.disable_progress_bar()
    machine.use_local_device()  # the barriers' too, with NCCL
    zero3.init_distributed()
    try:
        found = measure(arm, folder, config)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    Path(results, f"{arm}-{dist.get_rank()}.json").write_text(json.dumps(found))
    if "error" in found:
        sys.exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
