"""Blocks on their way in: received piece by piece, and checked while each piece is in the processor's cache."""

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

from kvtier.codec.checksums import RunningChecksum
from kvtier.codec.stored_form import Header, parse_header
from kvtier.errors import CorruptBlockError
from kvtier.identity.keys import StoreKey

PIECE_BYTES = 256 << 10
"""What is received and then looked at: well within a core's second-level cache."""
MAX_PIECE_BYTES = 2 << 20
"""The most bytes that a caller of `receive_blocks` may give for a piece."""
CHECKSUM = struct.Struct("<Q")
"""What stands behind a block whose checksum its header could not have."""
_WASTE = memoryview(bytearray(MAX_PIECE_BYTES))
"""The bytes of blocks that nobody wants go here. Written by all threads, read by none."""


class Arriving(Protocol):
    """One block of a payload that holds several, one after the other. One thread."""

    @property
    def nbytes(self) -> int:
        """How many bytes of the payload are this block."""

    def part(self, start: int, most: int) -> memoryview:
        """Returns the memory that the next bytes of the block, from `start` on, go to: `most` of them or fewer, and
        none only of a block that has none."""

    def note(self, part: memoryview, *, is_last: bool) -> None:
        """The next part has arrived."""


_Block = TypeVar("_Block", bound=Arriving)


class ArrivingBlock:
    """One raw block, which is held against its header. One thread."""

    __slots__ = ("_behind", "_into", "_running", "checksum", "fault", "nbytes", "tag")

    def __init__(self, tag: int, nbytes: int) -> None:
        """A block that is received and thrown away; see `wanted` for others.

        :param tag: the caller's.
        """
        self.tag = tag
        self.nbytes = nbytes
        self.fault: CorruptBlockError | None = None
        """Why it is not what was stored, known when it is complete."""
        self.checksum = 0
        """Its writer's, of a wanted block that is complete."""
        self._into: memoryview | None = None
        self._behind: memoryview | None = None
        """The checksum, where it comes behind the block."""
        self._running: RunningChecksum | None = None

    @classmethod
    def wanted(cls, tag: int, header: Header, into: memoryview, *, checksum_behind: bool = False) -> "ArrivingBlock":
        """A block that is received into `into` and held against its header, which is of that length.

        :param checksum_behind: its checksum comes behind it; the one in its header says nothing.
        """
        block = cls(tag, header.stored_length)
        block._into = into
        block._running = RunningChecksum(header.key, header.stored_length)
        block.checksum = header.checksum
        if checksum_behind:
            block._behind = memoryview(bytearray(CHECKSUM.size))
            block.nbytes += CHECKSUM.size
        return block

    @classmethod
    def asked_for(cls, tag: int, header: bytes, key: StoreKey, into: memoryview) -> "ArrivingBlock":
        """A block that somebody sends for the one under `key`. Faulty from the start when its header says otherwise."""
        try:
            parsed = parse_asked_for(header, key, len(into))
        except CorruptBlockError as error:
            block = cls(tag, len(into))
            block.fault = error
            return block
        return cls.wanted(tag, parsed, into)

    def part(self, start: int, most: int) -> memoryview:
        """Returns the memory that the next bytes of the block go to."""
        if self._into is None:
            return _WASTE[: min(most, self.nbytes - start)]
        if self._behind is not None and start >= len(self._into):
            return self._behind
        return self._into[start : start + most]

    def note(self, part: memoryview, *, is_last: bool) -> None:
        """The next part has arrived."""
        if self._running is None:
            return
        if part is self._behind:
            (self.checksum,) = CHECKSUM.unpack(part)
        else:
            self._running.update(part)
        if is_last and self._running.value() != self.checksum:
            self.fault = CorruptBlockError("checksum mismatch")


def parse_asked_for(header: bytes, key: StoreKey, nbytes: int) -> Header:
    """Returns the header of a block that somebody sends for the one under `key`, of so many bytes.

    Raises `CorruptBlockError` when it says otherwise.
    """
    parsed = parse_header(header)
    if parsed.key != key:
        raise CorruptBlockError("block of another key")
    if parsed.stored_length != nbytes:
        raise CorruptBlockError(f"block of {parsed.stored_length} bytes instead of {nbytes}")
    return parsed


def receive_blocks(
    receive_into: Callable[[list[memoryview]], None], blocks: Iterable[_Block], piece_bytes: int = PIECE_BYTES
) -> Iterator[_Block]:
    """Receives these blocks in order, about a piece at a time: parts of large ones, or several small ones together.

    Yields each when it is complete; see its `fault`.

    :param blocks: each is taken when its first bytes are to be received.
    :param receive_into: fills buffers one after the other with the next bytes of the payload.
    :param piece_bytes: at most `MAX_PIECE_BYTES`. The default suits a thread that has a core to itself.
    """
    for parts in _pieces(blocks, piece_bytes):
        receive_into([part for _, part, _ in parts])
        for block, part, is_last in parts:
            block.note(part, is_last=is_last)
            if is_last:
                yield block


def _pieces(blocks: Iterable[_Block], most: int) -> Iterator[list[tuple[_Block, memoryview, bool]]]:
    """(block, part of it, whether it is the last one) for about `most` bytes at a time."""
    parts: list[tuple[_Block, memoryview, bool]] = []
    room = most
    for block in blocks:
        start, is_last = 0, False
        while not is_last:
            part = block.part(start, most)
            start += len(part)
            is_last = start == block.nbytes
            parts.append((block, part, is_last))
            room -= len(part)
            if room <= 0:
                yield parts
                parts, room = [], most
    if parts:
        yield parts
