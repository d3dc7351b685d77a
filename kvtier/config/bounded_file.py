"""Reads files that may be pipes, such as a shell's `<(...)`, within bounds of time and size."""

import os
import select
from pathlib import Path

from kvtier.clock import MONOTONIC

_MOST_S = 3.0
"""How long a pipe may take, from the first byte to the last."""


def bounded_text(path: Path, most_bytes: int) -> str:
    """The text of a file in UTF-8. Raises `OSError` for what cannot be read, has more than `most_bytes`, or is a pipe
    that nobody writes into or that nobody closes, and `UnicodeDecodeError`. A file system that hangs is waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer would be waited for
    try:
        deadline_s, left = MONOTONIC() + _MOST_S, most_bytes + 1
        parts: list[bytes] = []
        while left > 0:
            if not select.select([descriptor], [], [], max(0.0, deadline_s - MONOTONIC()))[0]:
                raise TimeoutError(f"it is a pipe, and nobody has written all of it in {_MOST_S:g} s; name a file")
            if not (part := os.read(descriptor, min(left, 1 << 20))):
                return b"".join(parts).decode()
            parts.append(part)
            left -= len(part)
    finally:
        os.close(descriptor)
    raise OSError(f"it has more than {most_bytes:,} bytes; name a smaller file")
