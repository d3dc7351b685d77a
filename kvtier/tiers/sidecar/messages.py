"""What engine and tier process say to each other: frames of the block protocol over socket pairs, without payloads.

    request   verb; request_id: of the engine's request that it is for, or empty; tier, keys: 64 bytes each; places:
              offset and length u64 of each block in the shared memory; checksums of blocks to write, u64
    answer    error (empty, or the class of a `KvtierError`), message, values; news: `kvtier.tiers.sidecar.event_relay`

Both ends are of one version and trust each other. What does not parse ends the process all the same.
"""

import enum
import socket
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.errors import (
    ClosedError,
    ConfigError,
    InvalidInputError,
    InvariantError,
    KvtierError,
    LimitExceededError,
    UnauthenticatedError,
    UnavailableError,
)
from kvtier.identity.keys import STORE_KEY_BYTES, StoreKey
from kvtier.net.stream import PlainStream
from kvtier.protocol.block_socket import FrameSocket

MAX_BLOCKS = 32_768
"""The most blocks in one request: 2.5 MiB of keys and places."""

_ERRORS: dict[str, type[KvtierError]] = {
    kind.__name__: kind
    for kind in (
        ClosedError,
        ConfigError,
        InvalidInputError,
        InvariantError,
        LimitExceededError,
        UnauthenticatedError,
        UnavailableError,
    )
}


class Verb(enum.StrEnum):
    """The verbs of `Tier`, those of `LeasingTier`, and some for the process itself."""

    OPEN = "open"
    LOOKUP = "lookup"
    READ = "read"
    WRITE = "write"
    DISCARD = "discard"
    USAGE = "usage"
    CHECK = "check"
    LEASE = "lease"
    RELEASE = "release"
    """Ends loans."""
    SHARE = "share"
    """A slab that blocks are lent from: its descriptor comes with the answer."""
    SLABS = "slabs"
    """Which slabs the engine has mapped, and which of them it should give up."""
    NEWS = "news"
    """Nothing but the news that every answer brings."""
    CLOSE = "close"


NO_SLAB = 0
"""Serial of no slab: the place of a block that is not lent."""


def channel(end: socket.socket) -> FrameSocket:
    """A connection of one socket pair, from either end; owns it from now on."""
    return FrameSocket(PlainStream(end))


def pack_keys(keys: Sequence[StoreKey]) -> bytes:
    return b"".join(keys)


def unpack_keys(packed: bytes) -> list[StoreKey]:
    """Raises `InvalidInputError` when they are cut off."""
    if len(packed) % STORE_KEY_BYTES:
        raise InvalidInputError(f"{len(packed)} bytes of keys: not a multiple of {STORE_KEY_BYTES}")
    return [StoreKey(packed[start : start + STORE_KEY_BYTES]) for start in range(0, len(packed), STORE_KEY_BYTES)]


def pack_places(places: Sequence[tuple[int, int]]) -> bytes:
    return np.asarray(places, dtype="<u8").tobytes()


def unpack_places(packed: bytes, num_blocks: int, memory_bytes: int) -> list[tuple[int, int]]:
    """(offset, length) of each block. Raises `InvalidInputError` unless all lie in the memory."""
    if len(packed) != 16 * num_blocks:
        raise InvalidInputError(f"{len(packed)} bytes of places for {num_blocks} blocks")
    places: npt.NDArray[np.uint64] = np.frombuffer(packed, dtype="<u8").reshape(-1, 2)
    found = [(int(offset), int(length)) for offset, length in places]
    for offset, length in found:
        if offset + length > memory_bytes:
            raise InvalidInputError(f"{length} bytes at {offset}: outside of {memory_bytes} bytes of shared memory")
    return found


PLACE_FIELDS = ("serials", "slots", "generations", "checksums")
"""What the answer to `Verb.LEASE` says of each block: the fields of `SlotRef`, numbers each."""


def pack_numbers(numbers: Sequence[int]) -> bytes:
    return np.asarray(numbers, dtype="<u8").tobytes()


def unpack_numbers(packed: bytes) -> list[int]:
    """Raises `InvalidInputError` when they are cut off."""
    if len(packed) % 8:
        raise InvalidInputError(f"{len(packed)} bytes of numbers: not a multiple of 8")
    numbers: list[int] = np.frombuffer(packed, dtype="<u8").tolist()
    return numbers


def error_for(name: str, message: str) -> KvtierError:
    """What the engine raises for an error that the tier process answered with."""
    return _ERRORS.get(name, KvtierError)(message)
