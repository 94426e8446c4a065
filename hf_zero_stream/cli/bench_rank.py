"""One rank of ``bench``, started by torchrun: loads once, and writes its figures to a file.

python -m hf_zero_stream.cli.bench_rank ARM FOLDER CONFIG RESULTS
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
import transformers
from transformers.integrations import HfDeepSpeedConfig

from ..config import without_own_section
from ..context import streaming
from ..destinations.deepspeed import zero3
from ..loading.dry_load import model_class_of
from ..reports.memory import AnonymousMemory, GrowthPeak


def mapped_bytes() -> int:
    """This process's resident pages of mapped files."""
    found = re.search(r"^RssFile:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def measure(arm: str, folder: str, config: dict[str, Any]) -> dict[str, Any]:
    """Load with all ranks; returns this rank's figures."""
    import hf_zero_stream.destinations.deepspeed.partitioned  # noqa: F401 - not in the time of the load

    model_class, dtype = model_class_of(folder, {"trust_remote_code": False}), zero3.partition_dtype(config)
    # transformers finds ZeRO-3 while this object is alive.
    ds_config = HfDeepSpeedConfig(without_own_section(config)) if arm == "stock" else None
    with AnonymousMemory() as memory, GrowthPeak(mapped_bytes) as mapped:
        dist.barrier()
        start = time.perf_counter()
        if ds_config is not None:
            model = model_class.from_pretrained(folder, dtype=dtype)
        else:
            with streaming():
                model = model_class.from_pretrained(folder, dtype=dtype, ds_config=config)
        zero3.get_accelerator().synchronize()
        dist.barrier()
        seconds = time.perf_counter() - start
    report = getattr(model, "streaming_report", None)
    return {
        "seconds": seconds,
        "bytes_read": mapped.growth_peak if report is None else report.ranks[dist.get_rank()].bytes_read,
        "anonymous_growth_bytes": memory.growth_peak,
        "partition_bytes": sum(param.ds_tensor.nbytes for param in model.parameters()),
        "digest": zero3.partition_digest(model),
    }


def main() -> None:
    arm, folder, config_file, results = sys.argv[1:]
    config = json.loads(Path(config_file).read_text())
    transformers.utils.logging.disable_progress_bar()
    zero3.get_accelerator().set_device(zero3.local_device().index or 0)  # the barriers' too, with NCCL
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
