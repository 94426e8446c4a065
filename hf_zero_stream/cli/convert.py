"""``hf-zero-stream convert``: other shards, another dtype or another layout for a checkpoint on disk."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

import typer

from .output import CheckpointArgument, Format, FormatOption, bytes_text, count_text, emit, quiet


EXAMPLE = "hf-zero-stream convert ./checkpoint ./bf16 --dtype bfloat16 --max-shard-size 5GB"


class Layout(StrEnum):
    same = "same"
    hub = "hub"
    model = "model"


def run(
    path: CheckpointArgument,
    destination: Annotated[str, typer.Argument(metavar="DST", help="The folder to write; it may be PATH itself.")],
    dtype: Annotated[str | None, typer.Option("--dtype", help="Of the floating-point tensors.")] = None,
    max_shard_size: Annotated[str, typer.Option("--max-shard-size", metavar="SIZE", help="Of a file.")] = "5GB",
    layout: Annotated[
        Layout, typer.Option("--layout", help="Names and layouts: as they are, the hub's, or the model's own.")
    ] = Layout.same,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let Python code of the checkpoint run (for --layout).")
    ] = False,
    form: FormatOption = Format.table,
) -> None:
    """Write a checkpoint anew, in one pass and in bounded memory; no model is built.

    An older checkpoint in DST stays until the new one is complete. The --layout is "hub" for one tensor per expert, as
    save_pretrained writes them, or "model" for the tensors as the model has them.
    """
    import torch

    from .checkpoints import cached_folder

    wanted = None if dtype is None else getattr(torch, dtype, None)
    if dtype is not None and not (isinstance(wanted, torch.dtype) and wanted.is_floating_point):
        raise typer.BadParameter(f"--dtype: {dtype!r} is no floating-point dtype of torch")
    if not re.fullmatch(r"\d+(\.\d+)?[KMGT]B", max_shard_size):
        raise typer.BadParameter(f"--max-shard-size: expected a size as in 5GB or 500MB, got {max_shard_size!r}")
    with quiet():
        from ..convert import convert

        done = convert(
            cached_folder(path, None),
            destination,
            dtype=wanted,
            max_shard_size=max_shard_size,
            layout=layout.value,
            trust_remote_code=trust_remote_code,
            progress=form is Format.table,
        )
    data = {
        "path": destination,
        "files": list(done.files),
        "tensors": done.tensors,
        "bytes_read": done.bytes_read,
        "bytes_written": done.bytes_written,
        "anonymous_growth_peak": done.anonymous_growth_peak,
    }
    written = f"{count_text(done.tensors, 'tensor')} in {count_text(len(done.files), 'shard')}"
    emit(data, [f"{destination}: {written}, {bytes_text(done.bytes_written)}"], form)
