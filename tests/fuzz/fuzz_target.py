"""What a target of fuzzing is: bytes in, nothing out, and whatever is raised is a finding.

The first byte of an input are flags. Bit 0 is `MENDED` everywhere: the target makes checksums and lengths right before
it uses the input, as an attacker would, so that what lies behind them is reached. The other bits are each target's own.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from kvtier.testing.blocks import make_key, make_packable_payload

MENDED = 0x01
"""Whether checksums and lengths are made right first."""

Execute = Callable[[bytes], None]
"""Takes one input. Raises nothing but findings, and leaves nothing behind that grows."""


@dataclass(frozen=True, slots=True)
class Target:
    """One thing that reads bytes which others have written."""

    name: str
    about: str
    """What it reads, in a few words, for the report."""
    seeds: Callable[[], list[bytes]]
    """Valid inputs, by the code that writes such bytes in earnest."""
    opened: Callable[[], AbstractContextManager[Execute]]
    """What executes inputs, on one thread, with all that it needs."""
    max_bytes: int = 8192
    """The longest input that is made of the seeds."""
    most_runs: int = -1
    """Executions of one process, where atheris keeps so much memory of each that more would come to the bound; -1: as
    many as it has time for."""


KEY = make_key("golden")
"""The key of most blocks in seeds. Its payload of some length is always the same, so that a hit can be compared."""


def payload_of(nbytes: int, label: object = "golden") -> bytes:
    """The one payload of this length that a key's block may have."""
    return make_packable_payload(label, nbytes)


def flagged(flags: int, body: bytes) -> bytes:
    """An input."""
    return bytes([flags]) + body


class _Errors(logging.Handler):
    """Keeps what is logged with a traceback: exceptions that somebody caught because they should not have been."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.caught: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.caught.append(record.exc_info[1])


@contextlib.contextmanager
def internal_errors() -> Iterator[list[BaseException]]:
    """Exceptions that kvtier has logged since: internal errors, where a thread may not die of them."""
    errors = _Errors()
    loggers = [logging.getLogger(name) for name in ("kvtier", "kvtier_pool")]
    for logger in loggers:
        logger.addHandler(errors)
    try:
        yield errors.caught
    finally:
        for logger in loggers:
            logger.removeHandler(errors)


def require_none(errors: list[BaseException]) -> None:
    """Raises the first of them."""
    if errors:
        error = errors[0]
        errors.clear()
        raise AssertionError("an internal error") from error
