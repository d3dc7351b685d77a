"""The protocol every tier speaks: few verbs, always in batches, a status per item.

Payloads are opaque bytes. All blocks of a namespace have one payload length, which both sides know.
"""

import enum
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvtier.errors import InvalidInputError
from kvtier.identity.keys import StoreKey
from kvtier.memory.buffers import ReadableBuffer

PayloadT_contra = TypeVar("PayloadT_contra", bound=Sized, contravariant=True)
TargetT_contra = TypeVar("TargetT_contra", bound=Sized, contravariant=True)
"""What a tier writes from and reads into; `len` is bytes."""
_PayloadT = TypeVar("_PayloadT")
Item = tuple[StoreKey, _PayloadT, int]
"""A block to write: its key, its payload, and the checksum that its writer has computed of it
(`kvtier.codec.checksums`)."""


class Status(enum.IntEnum):
    """Answer to a lookup or read of one key."""

    MISS = 0
    HIT = 1
    PENDING = 2
    """A write of this key is under way: ask again, or treat as a miss. Never answered by `read`."""


class WriteStatus(enum.IntEnum):
    """Answer to a write of one block. Everything else than STORED and EXISTS: the block is not there."""

    STORED = 0
    EXISTS = 1
    """Already there, or being written by somebody else, who may yet fail: then it is forgotten. These bytes were not
    used. A caller that must know looks it up afterwards: HIT or PENDING."""
    FULL = 2
    """No room that may be freed, quota reached, or payload longer than the tier takes."""
    THROTTLED = 3
    """Too much is queued already: the block was dropped so that nobody waits."""
    FAILED = 4
    """The medium or the connection failed; counted and logged by the tier."""


@dataclass(frozen=True, slots=True)
class Usage:
    """How full a tier is. Capacity 0 means unknown or unlimited."""

    num_blocks: int
    used_bytes: int
    capacity_bytes: int


class TierOf(Protocol[PayloadT_contra, TargetT_contra]):
    """One level of storage. All methods may be called from any thread and may block on I/O.

    A tier never holds a lock across I/O or a copy. Wrong, torn, foreign or stale bytes are a MISS and
    a counter. No method but `check` raises for what the medium does; all raise `ClosedError` after
    `close`.
    """

    @property
    def name(self) -> str:
        """Name in metrics and events: `host`, `disk`, `pool`, ..."""

    def lookup(self, keys: Sequence[StoreKey]) -> list[Status]:
        """A status per key, in order. Does not count as a use for eviction."""

    def read(self, keys: Sequence[StoreKey], into: Sequence[TargetT_contra]) -> list[Status]:
        """Copies the payload of `keys[i]` over all of `into[i]`.

        HIT means that every byte was written and verified. After MISS the content of `into[i]` is
        undefined. A payload of another length than `into[i]` is a MISS. Counts as a use.
        """

    def write(self, items: Sequence[Item[PayloadT_contra]]) -> list[WriteStatus]:
        """Stores payloads. STORED acknowledges: readable now; for EXISTS see there. Buffers are the caller's on return.

        Keys are content addresses, so a key that exists is not overwritten: nobody needs to look it up before.

        Checksums are kept as they come, whatever they are. What does not match is found out by whoever reads it from
        where its bytes leave this process, for whom it is a MISS.
        """

    def discard(self, keys: Sequence[StoreKey]) -> int:
        """Forgets these keys as soon as nobody reads them; returns how many were there. They miss at once."""

    def usage(self) -> Usage:
        """Cheap; exact at some moment during the call."""

    def check(self) -> None:
        """Verifies the bookkeeping; raises `InvariantError`. For tests and `fsck`; may be slow."""

    def close(self) -> None:
        """Gives back everything. Waits for calls in flight. Idempotent."""


Tier = TierOf[ReadableBuffer, memoryview]
"""A tier of blocks each of which is in one place."""


def require_pairs(keys: Sequence[StoreKey], into: Sequence[Sized]) -> None:
    """Raises `InvalidInputError` unless a `read` names as many buffers as keys."""
    if len(keys) != len(into):
        raise InvalidInputError(f"read of {len(keys)} keys into {len(into)} buffers: needs one buffer per key")
