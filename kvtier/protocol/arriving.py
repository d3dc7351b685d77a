"""Blocks on their way in: received piece by piece, and checked while each piece is in the processor's cache."""

from collections.abc import Callable, Iterable, Iterator

from kvtier.codec.checksums import RunningChecksum
from kvtier.codec.stored_form import Header, parse_header
from kvtier.errors import CorruptBlockError
from kvtier.identity.keys import StoreKey

PIECE_BYTES = 256 << 10
"""What is received and then looked at: well within a core's second-level cache."""
MAX_PIECE_BYTES = 2 << 20
"""The most bytes that a caller of `receive_blocks` may give for a piece."""
_WASTE = memoryview(bytearray(MAX_PIECE_BYTES))
"""The bytes of blocks that nobody wants go here. Written by all threads, read by none."""


class ArrivingBlock:
    """One raw block of a payload that holds several, one after the other. One thread."""

    __slots__ = ("_expected", "_into", "_running", "fault", "nbytes", "tag")

    def __init__(self, tag: int, nbytes: int) -> None:
        """A block that is received and thrown away; see `wanted` for others.

        :param tag: the caller's.
        """
        self.tag = tag
        self.nbytes = nbytes
        self.fault: CorruptBlockError | None = None
        """Why it is not what was stored, known when it is complete."""
        self._into: memoryview | None = None
        self._running: RunningChecksum | None = None
        self._expected = 0

    @classmethod
    def wanted(cls, tag: int, header: Header, into: memoryview) -> "ArrivingBlock":
        """A block that is received into `into` and held against its header, which is of that length."""
        block = cls(tag, header.stored_length)
        block._into = into
        block._running = RunningChecksum(header.key, header.stored_length)
        block._expected = header.checksum
        return block

    @classmethod
    def asked_for(cls, tag: int, header: bytes, key: StoreKey, into: memoryview) -> "ArrivingBlock":
        """A block that somebody sends for the one under `key`. Faulty from the start when its header says otherwise."""
        try:
            parsed = parse_header(header)
            if parsed.key != key:
                raise CorruptBlockError("block of another key")
            if parsed.stored_length != len(into):
                raise CorruptBlockError(f"block of {parsed.stored_length} bytes instead of {len(into)}")
        except CorruptBlockError as error:
            block = cls(tag, len(into))
            block.fault = error
            return block
        return cls.wanted(tag, parsed, into)

    def part(self, start: int, nbytes: int) -> memoryview:
        """Returns the memory that these bytes of the block go to."""
        return _WASTE[:nbytes] if self._into is None else self._into[start : start + nbytes]

    def note(self, part: memoryview, *, is_last: bool) -> None:
        """The next part has arrived."""
        if self._running is not None:
            self._running.update(part)
            if is_last and self._running.value() != self._expected:
                self.fault = CorruptBlockError("checksum mismatch")


def receive_blocks(
    receive_into: Callable[[list[memoryview]], None], blocks: Iterable[ArrivingBlock], piece_bytes: int = PIECE_BYTES
) -> Iterator[ArrivingBlock]:
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


def _pieces(blocks: Iterable[ArrivingBlock], most: int) -> Iterator[list[tuple[ArrivingBlock, memoryview, bool]]]:
    """(block, part of it, whether it is the last one) for about `most` bytes at a time."""
    parts: list[tuple[ArrivingBlock, memoryview, bool]] = []
    room = most
    for block in blocks:
        for start in range(0, max(1, block.nbytes), most):
            nbytes = min(most, block.nbytes - start)
            parts.append((block, block.part(start, nbytes), start + nbytes == block.nbytes))
            room -= nbytes
            if room <= 0:
                yield parts
                parts, room = [], most
    if parts:
        yield parts
