"""What ranks run: one model after another, each row written down at once, so that a crash loses no other model.

A model that raises ends its batch, because the ranks may be out of step after it; the caller goes on with fresh ranks.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import shutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, core_model_loading
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.utils import logging

from tests.parity import differences, ds_config
from tests.saving import different
from tests.sweep.fixes import NO_LOADING_INFO


__all__ = ["DTYPES", "JOBS", "run_batch"]

SAVED_SHARD_SIZE = "100KB"
"""Most tiny models then have several shards."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def run_batch(job: str, cases: list[dict[str, Any]], log: Path, limit_s: float, dtype: str = "fp32") -> None:
    """Run one of `JOBS` on every case and append a line of JSON per case to ``log.<rank>``.

    `dtype` is the name of the files' dtype, or ``"fp32-bf16"`` for files in the first, loaded in the second.
    A case that takes longer than `limit_s` ends the process, with its stacks in ``log.<rank>.stacks``.
    """
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    rank = dist.get_rank()
    in_files, _, loaded = dtype.partition("-")
    with open(f"{log}.{rank}.stacks", "w") as stacks, open(f"{log}.{rank}", "a") as rows:
        for case in cases:
            faulthandler.dump_traceback_later(limit_s, exit=True, file=stacks)
            row: dict[str, Any] = {"id": case["id"]}
            try:
                row |= JOBS[job](case, Path(case["folder"]) / in_files, DTYPES[loaded or in_files])
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


def _ours(case: dict[str, Any], folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    """Streamed through the model's own class, and through a Streaming Auto class where one knows it."""
    import hf_zero_stream

    model_class = _class_of(case)
    with _recorded_ops() as ops:
        plain, plain_info = _load_plain(model_class, folder, dtype)
    with hf_zero_stream.streaming():
        streamed, info = _load(model_class, folder, dtype, ds_config=ds_config(dtype))
    found = [*_info_differences(info, plain_info), *differences(streamed, plain, dtype)]
    for param in plain.parameters():
        if param.is_floating_point():
            param.data = param.data.to(dtype)  # DeepSpeed wants one dtype for all of them
    found += _saved_differences(streamed, plain, folder)
    report = streamed.streaming_report.to_dict()
    del streamed
    gc.collect()
    if case.get("auto_class"):
        streaming_class = getattr(hf_zero_stream, f"Streaming{case['auto_class']}")
        streamed, info = _load(streaming_class, folder, dtype, ds_config=ds_config(dtype))
        if type(streamed) is not type(plain):
            found.append(f"Auto class: made a {type(streamed).__name__}")
        else:
            found += [f"Auto class: {what}" for what in _info_differences(info, plain_info)]
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


def _saved_differences(streamed: Any, plain: Any, folder: Path) -> list[str]:
    """Files that we save differently from what stock saves of the plain model, or an error that only one of us has."""
    import hf_zero_stream

    target = folder.with_name(f"saved {folder.name}")
    errors: dict[str, str] = {}

    def attempt(name: str, save: Callable[[], Any]) -> None:
        try:
            save()
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
        dist.barrier()

    # Stock's on the main rank only; the others need to know whether it could.
    attempt(
        "stock", lambda: plain.save_pretrained(target / f"stock {dist.get_rank()}", max_shard_size=SAVED_SHARD_SIZE)
    )
    attempt(
        "ours",
        lambda: hf_zero_stream.save_pretrained(
            streamed, target / "ours", max_shard_size=SAVED_SHARD_SIZE, chunk_bytes=2**14, progress=False
        ),
    )
    if errors:
        found = [] if len(errors) == 2 else [f"saving: {name}: {error}"[:400] for name, error in errors.items()]
    else:
        found = [f"saving: {name} differs" for name in different(target / "ours", target / "stock 0")]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(target, ignore_errors=True)
    return found


def _stock(case: dict[str, Any], folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    """Stock transformers and DeepSpeed, as plain loading is compared with ours."""
    model_class = _class_of(case)
    plain, plain_info = _load_plain(model_class, folder, dtype)
    kept_alive = HfDeepSpeedConfig(ds_config(dtype))
    loaded, info = _load(model_class, folder, dtype)
    whole = [name for name, param in loaded.named_parameters() if not hasattr(param, "ds_tensor")]
    found = [f"not partitioned: {', '.join(whole[:4])} ({len(whole)} in all)"] if whole else []
    found += _info_differences(info, plain_info)
    if not whole:
        found += [what for what in differences(loaded, plain, dtype) if not what.endswith("padding is not zero")]
    del loaded, kept_alive
    return {"differences": found}


JOBS: dict[str, Callable[[dict[str, Any], Path, torch.dtype], dict[str, Any]]] = {
    "make": _make,
    "ours": _ours,
    "stock": _stock,
}


# ------------------------------------------------------------------------------------------------------------- parts


def _class_of(case: dict[str, Any]) -> type[PreTrainedModel]:
    return getattr(importlib.import_module(case["module"]), case["class"])


def _load_plain(model_class: Any, folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, Any]]:
    gc.collect()
    assert not is_deepspeed_zero3_enabled(), "the config of the model before is still alive"
    return _load(model_class, folder, dtype)


def _load(loader: Any, folder: Path, dtype: torch.dtype, **kwargs: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load; every load starts from the same random numbers, and memory nobody wrote to reads as NaN, not as chance."""
    gc.collect()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        if json.loads((folder / "config.json").read_text())["architectures"][0] in NO_LOADING_INFO:
            return loader.from_pretrained(folder, dtype=dtype, **kwargs), {}
        return loader.from_pretrained(folder, dtype=dtype, output_loading_info=True, **kwargs)
    finally:
        torch.use_deterministic_algorithms(False)


def _info_differences(info: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    return [
        f"{name}: {info.get(name)}, expected {expected.get(name)}"[:600]
        for name in expected | info
        if info.get(name) != expected.get(name)
    ]


@contextmanager
def _recorded_ops() -> Iterator[set[str]]:
    """The names of the conversion ops that run inside."""
    used: set[str] = set()
    originals = {
        op: op.convert
        for op in core_model_loading.ConversionOps.__subclasses__()
        if "convert" in vars(op) and not op.__name__.startswith("_")
    }

    def recording(original: Callable[..., Any]) -> Callable[..., Any]:
        def convert(self: Any, *args: Any, **kwargs: Any) -> Any:
            used.add(type(self).__name__)
            return original(self, *args, **kwargs)

        return convert

    for op, original in originals.items():
        op.convert = recording(original)
    try:
        yield used
    finally:
        for op, original in originals.items():
            op.convert = original
