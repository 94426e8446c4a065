"""What ranks run: one model after another, each row written down at once, so that a crash loses no other model.

A model that raises ends its batch, because the ranks may be out of step after it; the caller goes on with fresh ranks.
"""

import faulthandler
import gc
import json
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers.integrations import HfDeepSpeedConfig
from transformers.utils import logging

import hf_zero_stream
from hf_zero_stream.holdings.introspection import lies_in_files
from tests.support.parity import differences, ds_config
from tests.sweep import drawn, sharded
from tests.sweep.destinations import Destination
from tests.sweep.loads import class_of, generators, info_differences, load, load_plain, recorded_ops, saved_differences


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def run_batch(
    job: str, cases: list[dict[str, Any]], log: Path, limit_s: float, destination: Destination, dtype: str = "fp32"
) -> None:
    """Run a job, ``make``, ``ours`` or ``stock``, on every case and append a line of JSON per case to ``log.<rank>``.

    `dtype` is the name of the files' dtype, or ``"fp32-bf16"`` for files in the first, loaded in the second.
    A case that takes longer than `limit_s` ends the process, with its stacks in ``log.<rank>.stacks``.
    """
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    rank = dist.get_rank()
    in_files, _, loaded = dtype.partition("-")
    if job == "make":
        run = _make
    elif destination.family == "zero3":
        run = {"ours": _ours, "stock": _stock}[job]
    elif destination.family == "files":
        run = _from_files
    elif destination.family in ("drawn", "accelerate"):
        run = {"drawn": drawn.stocks, "accelerate": drawn.accelerates}[destination.family]
    else:
        run = {"ours": sharded.ours, "stock": sharded.stock}[job]
    with open(f"{log}.{rank}.stacks", "w") as stacks, open(f"{log}.{rank}", "a") as rows:
        for case in cases:
            faulthandler.dump_traceback_later(limit_s, exit=True, file=stacks)
            row: dict[str, Any] = {"id": case["id"]}
            try:
                row |= run(case, Path(case["folder"]) / in_files, DTYPES[loaded or in_files], destination)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:2000]
                row["traceback"] = traceback.format_exc()[-6000:]
            faulthandler.cancel_dump_traceback_later()
            rows.write(json.dumps(row) + "\n")
            rows.flush()
            if "error" in row and job != "make":
                raise RuntimeError(row["error"])
            gc.collect()


# -------------------------------------------------------------------------------------------------------------- jobs


def _make(case: dict[str, Any], *_: Any) -> dict[str, Any]:
    """Save the type's tiny checkpoints; a type that cannot be built is a row too."""
    from tests.sweep.tiny import CannotBuild, make_checkpoints

    folders = {DTYPES[name]: Path(case["folder"]) / name for name in case["dtypes"]}
    try:
        return make_checkpoints(case["type"], case["class"], folders)
    except CannotBuild as error:
        return {"cannot_build": str(error)}


def _ours(case: dict[str, Any], folder: Path, dtype: torch.dtype, _: Destination) -> dict[str, Any]:
    """Streamed through the model's own class, and through a Streaming Auto class where one knows it."""
    model_class = class_of(case)
    with recorded_ops() as ops:
        plain, plain_info = load_plain(model_class, folder, dtype)
    as_plain = generators()
    with hf_zero_stream.streaming():
        streamed, info = load(model_class, folder, dtype, ds_config=ds_config(dtype))
    found = [] if generators() == as_plain else ["the random number generators are not as after a plain load"]
    found += info_differences(info, plain_info) + _loaded_and_saved(streamed, plain, folder, dtype)
    report = streamed.streaming_report.to_dict()
    del streamed
    gc.collect()
    if case.get("auto_class"):
        streaming_class = getattr(hf_zero_stream, f"Streaming{case['auto_class']}")
        streamed, info = load(streaming_class, folder, dtype, ds_config=ds_config(dtype))
        if type(streamed) is not type(plain):
            found.append(f"Auto class: made a {type(streamed).__name__}")
        else:
            found += [f"Auto class: {what}" for what in info_differences(info, plain_info)]
            found += [f"Auto class: {what}" for what in differences(streamed, plain, dtype)]
        del streamed
    materialised = {name: why for rank in report["ranks"] for name, why in rank["materialised"].items()}
    return {
        "differences": found,
        "ops": sorted(ops),
        "materialised": materialised,
        "read": sum(rank["bytes_read"] for rank in report["ranks"]),
        "needed": sum(rank["bytes_needed"] for rank in report["ranks"]),
    }


def _from_files(case: dict[str, Any], folder: Path, dtype: torch.dtype, _: Destination) -> dict[str, Any]:
    """With all weights in the files, from where they are gathered, and saved."""
    model_class = class_of(case)
    plain, plain_info = load_plain(model_class, folder, dtype)
    with hf_zero_stream.streaming(frozen_weights="files"):
        config = ds_config(dtype, stage3_param_persistence_threshold=0)
        streamed, info = load(model_class, folder, dtype, ds_config=config)
    found = [] if any(map(lies_in_files, streamed.parameters())) else ["no weight stays in the files"]
    found += info_differences(info, plain_info) + _loaded_and_saved(streamed, plain, folder, dtype)
    return {"differences": found}


def _loaded_and_saved(streamed: Any, plain: Any, folder: Path, dtype: torch.dtype) -> list[str]:
    """How a partitioned model, and the files that it saves, differ from a plain one; casts `plain` to `dtype`."""
    found = differences(streamed, plain, dtype)
    for param in plain.parameters():
        if param.is_floating_point():
            param.data = param.data.to(dtype)  # DeepSpeed wants one dtype for all of them
    return found + saved_differences(streamed, plain, folder)


def _stock(case: dict[str, Any], folder: Path, dtype: torch.dtype, _: Destination) -> dict[str, Any]:
    """Stock transformers and DeepSpeed, as plain loading is compared with ours."""
    model_class = class_of(case)
    plain, plain_info = load_plain(model_class, folder, dtype)
    kept_alive = HfDeepSpeedConfig(ds_config(dtype))
    loaded, info = load(model_class, folder, dtype)
    whole = [name for name, param in loaded.named_parameters() if not hasattr(param, "ds_tensor")]
    found = [f"not partitioned: {', '.join(whole[:4])} ({len(whole)} in all)"] if whole else []
    found += info_differences(info, plain_info)
    if not whole:
        found += [what for what in differences(loaded, plain, dtype) if not what.endswith("padding is not zero")]
    del loaded, kept_alive
    return {"differences": found}
