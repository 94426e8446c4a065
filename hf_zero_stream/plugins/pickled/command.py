"""``hf-zero-stream convert``: other shards, another dtype or another layout for a checkpoint on disk."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated, Any, Literal

import typer

from ...errors import ConfigError
from ...plugin_api import bytes_text, count_text, floating_dtype, frame


EXAMPLE = "hf-zero-stream convert ./checkpoint ./bf16 --dtype bfloat16 --max-shard-size 5GB"


def _floating_dtype(name: str) -> Any:
    try:
        return floating_dtype(name)
    except ConfigError as error:
        raise typer.BadParameter(str(error).removeprefix("dtype: ")) from error


def run(
    path: frame.CheckpointArgument,
    destination: Annotated[str, typer.Argument(metavar="DST", help="The folder to write; it may be PATH itself.")],
    dtype: Annotated[
        Any, typer.Option(metavar="DTYPE", parser=_floating_dtype, help="New dtype of the floating-point tensors.")
    ] = None,
    max_shard_size: Annotated[
        Any, typer.Option(metavar="SIZE", parser=frame.size, help="Largest size of a shard.")
    ] = "5GB",
    layout: Annotated[
        Literal["same", "hub", "model"],
        typer.Option(help="Names and layouts: as they are, the hub's, or the model's own."),
    ] = "same",
    config: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Where config and tokenizer are, if not in PATH.")
    ] = None,
    trust_remote_code: frame.TrustOption = False,
    form: frame.FormatOption = "table",
) -> None:
    """Write a checkpoint anew: other shards, dtype or names.

    Reads it once, in bounded memory, and builds no model. An older checkpoint in DST stays until the new one is
    complete. The --layout "hub" has one tensor per expert, as save_pretrained writes them; "model" has the tensors of
    the model.
    """
    from ...plugin_api import cached_folder, transformers_errors

    with frame.quiet(), nullcontext() if layout == "same" else transformers_errors(path):
        from .convert import convert

        done = convert(
            cached_folder(path, None),
            destination,
            dtype=dtype,
            max_shard_size=max_shard_size,
            layout=layout,
            config=config,
            trust_remote_code=trust_remote_code,
            progress=form == "table",
        )
    written = f"{count_text(done.tensors, 'tensor')} in {count_text(len(done.files), 'shard')}"
    text = f"{destination}: {written}, {bytes_text(done.bytes_written)}"
    frame.emit({"path": destination, **asdict(done)}, [text], form)
