"""What code says: the warnings that it logs, and its errors, as texts."""

import logging
import logging.handlers
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Messages(logging.Handler):
    """Collects the warnings of transformers and of hf_zero_stream."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def listen(*loggers: str) -> list[str]:
    """The warnings of these loggers, by default of hf_zero_stream, from now on, in this process."""
    messages = Messages()
    for name in loggers or ("hf_zero_stream",):
        logging.getLogger(name).addHandler(messages)
    return messages.found


def message_of(call: Callable[[], Any], otherwise: str = "nothing") -> str:
    """The class and the message of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return otherwise


@contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    """What the logger `name` says inside the block, in this thread or another."""
    handler = logging.handlers.BufferingHandler(capacity=1000)
    logger, found = logging.getLogger(name), []
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        found.extend(record.getMessage() for record in handler.buffer)
