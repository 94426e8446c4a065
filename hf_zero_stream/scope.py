"""Which ``streaming()`` blocks the running code is in, and with which settings.

A context variable holds the blocks, and each block knows whether it is open, because the variable alone cannot tell: a
block may be left in another context than it was entered in (the garbage collector closes an unfinished generator
wherever it runs), and a task keeps a copy of the context that it was made in, also when the block has been left there.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from .config import StreamingConfig


__all__ = ["Block", "active_configs", "current_config", "enter", "leave"]


@dataclass(eq=False)
class Block:
    """One ``with streaming(config)``."""

    config: StreamingConfig | None
    is_open: bool = True


_blocks: ContextVar[tuple[Block, ...]] = ContextVar("hf_zero_stream_blocks", default=())


def active_configs() -> tuple[StreamingConfig | None, ...]:
    """The settings of the open blocks around the running code, the innermost last."""
    return tuple(block.config for block in _open_blocks())


def current_config() -> StreamingConfig | None:
    """The settings of the innermost open block; None without one, or if it has none of its own."""
    return (active_configs() or (None,))[-1]


def enter(config: StreamingConfig | None) -> Block:
    """Begin a block; without a `config` it has that of the block around it."""
    block = Block(current_config() if config is None else config)
    _blocks.set((*_open_blocks(), block))
    return block


def leave(mine: list[Block]) -> None:
    """End the innermost of the blocks `mine`, else the last that was entered in any context; remove it from `mine`."""
    if not mine:
        raise RuntimeError("streaming() is left more often than it was entered.")
    block = next((block for block in reversed(_blocks.get()) if block in mine), mine[-1])
    mine.remove(block)
    block.is_open = False
    _blocks.set(_open_blocks())


def _open_blocks() -> tuple[Block, ...]:
    return tuple(block for block in _blocks.get() if block.is_open)
