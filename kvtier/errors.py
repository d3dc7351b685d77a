"""The one exception tree. Each class says what the caller should do.

Miss, pending and refused are values (`kvtier.tiers.base`), never exceptions. Inside an engine no
error of a tier reaches a request: it becomes a miss and a counter.
"""

import enum


class KvtierError(Exception):
    """Base of everything kvtier raises on purpose."""


class ConfigError(KvtierError):
    """The configuration cannot be used. Mend the file, key or variable that the message names."""


class InvalidInputError(KvtierError, ValueError):
    """An argument is out of its documented range. A bug of the caller: do not retry."""


class CorruptBlockError(KvtierError):
    """Stored bytes are torn, altered, foreign or of another version. Treat as a miss; drop the block."""


class SealFault(enum.StrEnum):
    """Why a block cannot be opened."""

    ALTERED = "altered"
    """It is not what the key of this id has sealed for this place: changed, put elsewhere, forged, or another key."""
    CHANGED_BEFORE = "changed_before"
    """It opens, and is not what its writer has summed: its bytes changed before they were sealed."""
    PLAIN = "plain"
    """It is not sealed, where only sealed blocks are taken."""
    UNKNOWN_KEY = "unknown_key"
    """It is sealed with an older key than the newest one here, and that key is not here."""
    NEWER_KEY = "newer_key"
    """It is sealed with a newer key than any that is here: somebody else has got a new key before us."""


class SealedBlockError(CorruptBlockError):
    """A block cannot be opened with the keys that are here. Treat as a miss; drop the block unless its key is newer."""

    def __init__(self, fault: SealFault, text: str) -> None:
        super().__init__(text)
        self.fault = fault


class DeviceFaultError(KvtierError):
    """Bytes that were copied to the device are not there as they were. Compute instead; look at the device."""


class UnauthenticatedError(KvtierError):
    """The pool does not accept the credentials. Check the tenant's token; retrying does not help."""


class UnavailableError(KvtierError):
    """The other side cannot be reached, or not in time. Retry later; meanwhile treat as a miss."""


class LimitExceededError(KvtierError):
    """A request is larger than a documented limit. Split it."""


class ClosedError(KvtierError):
    """The object was closed. Make a new one."""


class InvariantError(KvtierError):
    """`check()` found broken bookkeeping: a bug of kvtier. Please report it with the message."""


def printable(text: str) -> str:
    """`text` for a terminal or a log: what is not printable is written as Python escapes it."""
    return text if text.isprintable() else "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
