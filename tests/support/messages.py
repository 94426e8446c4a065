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


def error_of(call: Callable[[], Any]) -> tuple[str, str]:
    """The class and the message of the error that a call raises; of none, two empty texts."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def message_of(call: Callable[[], Any], otherwise: str = "nothing") -> str:
    """The same as one text."""
    return ": ".join(found) if any(found := error_of(call)) else otherwise


def outcome_of(call: Callable[[], Any]) -> Any:
    """What a call returns, or the text of its error."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    """What the logger `name` warns of inside the block, in this thread or another."""
    handler = logging.handlers.BufferingHandler(capacity=1000)
    handler.setLevel(logging.WARNING)
    logger, found = logging.getLogger(name), []
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        found.extend(record.getMessage() for record in handler.buffer)
