"""Reading blocks from a Redis: payloads are received where they belong, and verified there."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtier.clock import MONOTONIC
from kvtier.codec.stored_form import HEADER_BYTES, Codec, Header, parse_stored_header, unpack, verify
from kvtier.errors import CorruptBlockError
from kvtier.identity.keys import StoreKey
from kvtier.tiers.redis.answers import ReplyError
from kvtier.tiers.redis.commands import MAX_PARTS, get, part_names
from kvtier.tiers.redis.connection import RedisConnection
from kvtier.tiers.redis.servers import REDIRECTS, RedisServers


@dataclass(slots=True)
class _Arriving:
    """A block whose first part is there. Of one read, so of one thread."""

    place: int
    header: Header
    stored: memoryview
    """Where the payload as stored is received."""


@dataclass(slots=True)
class Found:
    """What a read came to. Filled as it goes: what is in it when the read fails holds nevertheless."""

    hits: list[int] = field(default_factory=list)
    """Places of blocks that are verified."""
    corrupt: list[str] = field(default_factory=list)
    """What is wrong with blocks that are not."""
    to_drop: list[bytes] = field(default_factory=list)
    """Names of values that are corrupt, or of no use without parts that are gone."""
    num_moved: int = 0
    """Blocks that nobody answered for, because a Cluster was moving them."""


class BlockReader:
    """One batch of reads. One thread."""

    def __init__(
        self,
        keys: Sequence[StoreKey],
        names: Sequence[bytes],
        into: Sequence[memoryview],
        *,
        ttl_ms: int,
        max_value_bytes: int,
    ) -> None:
        """
        :param into: one buffer for each key; of no meaning afterwards where `found` has no hit.
        """
        self.found = Found()
        self._keys, self._names, self._into = keys, names, into
        self._ttl_ms = ttl_ms
        self._max_value_bytes = max_value_bytes
        self._scratch = bytearray()
        """For payloads that have to be unpacked."""
        self._large: list[_Arriving] = []
        self._has_stray = False
        """One of them is of another length than was asked for."""

    def read(self, servers: RedisServers, timeout_s: float) -> None:
        """Blocks up to `timeout_s`; raises as `RedisServers.exchange` does."""
        deadline = MONOTONIC() + timeout_s
        names = self._names
        moved = servers.exchange(names, lambda places: self._gets(names, places), self._receive_firsts, timeout_s)
        self.found.num_moved += len(moved)
        if self._large:
            self._read_parts(servers, deadline - MONOTONIC())

    def _gets(self, names: Sequence[bytes], places: Sequence[int]) -> list[bytes]:
        return [b"".join([get(names[place], self._ttl_ms) for place in places])]

    def _receive_firsts(self, connection: RedisConnection, places: Sequence[int]) -> list[int]:
        moved: list[int] = []
        for place in places:
            length = connection.receive_bulk_length()
            if isinstance(length, ReplyError):
                if length.code in REDIRECTS:
                    moved.append(place)
                elif length.code == "WRONGTYPE":
                    self._drop(place, "no string but something else lies there")
                else:
                    raise length.translated()
            elif length is not None:
                try:
                    self._receive_first(connection, place, length)
                except CorruptBlockError as error:
                    self._drop(place, str(error))
                connection.end_bulk()
        return moved

    def _receive_first(self, connection: RedisConnection, place: int, length: int) -> None:
        """Receives the value whatever it is; raises `CorruptBlockError` after that."""
        head = bytearray(min(length, HEADER_BYTES))
        connection.receive_into(memoryview(head))
        length -= len(head)
        into = self._into[place]
        try:
            header = parse_stored_header(head)
            self._require_fitting(header, place, length)
        except CorruptBlockError:
            connection.skip(length)
            raise
        is_large = header.stored_length > length
        fits = header.raw_length == len(into)
        if is_large and not fits:
            if self._has_stray:
                connection.skip(length)
                return
            # A miss in any case; but if it is its header that does not hold, the block must go, or it is one for ever.
            self._has_stray = True  # one at a time: nobody has made room for more
        in_place = fits and header.codec is Codec.RAW
        arriving = _Arriving(place, header, into if in_place else self._room(header, is_large))
        connection.receive_into(arriving.stored[:length])
        if is_large:
            self._large.append(arriving)
        else:
            self._finish(arriving)

    def _require_fitting(self, header: Header, place: int, length: int) -> None:
        if header.key != self._keys[place]:
            raise CorruptBlockError("block of another key")
        if length != min(header.stored_length, self._max_value_bytes):
            raise CorruptBlockError(f"truncated or too long: {length} bytes where {header.stored_length} are stored")
        if header.stored_length > max(len(self._into[place]), MAX_PARTS * self._max_value_bytes):
            raise CorruptBlockError(f"a block of {header.stored_length} bytes is none of ours")

    def _room(self, header: Header, is_large: bool) -> memoryview:
        if is_large:  # it waits for its other parts while more blocks arrive
            return np.empty(header.stored_length, dtype=np.uint8).data  # touched only where something comes
        if len(self._scratch) < header.stored_length:
            self._scratch = bytearray(header.stored_length)
        return memoryview(self._scratch)[: header.stored_length]

    def _finish(self, arriving: _Arriving) -> None:
        """All of the payload as stored is there. In order but of another length than was asked for, it is a miss."""
        place, header, into = arriving.place, arriving.header, self._into[arriving.place]
        verify(header, self._keys[place], arriving.stored)
        if header.raw_length == len(into):
            if header.codec is not Codec.RAW:
                unpack(header, arriving.stored, into)
            self.found.hits.append(place)

    def _read_parts(self, servers: RedisServers, timeout_s: float) -> None:
        """The parts after the first, of all large blocks together."""
        names: list[bytes] = []
        parts: list[tuple[_Arriving, memoryview]] = []
        step = self._max_value_bytes
        for block in self._large:
            names += self._part_names(block)
            parts += [(block, block.stored[start : start + step]) for start in range(step, len(block.stored), step)]
        missing: set[int] = set()
        garbled: dict[int, str] = {}

        def receive(connection: RedisConnection, places: Sequence[int]) -> list[int]:
            moved: list[int] = []
            for place in places:
                block, room = parts[place]
                length = connection.receive_bulk_length()
                if isinstance(length, ReplyError):
                    if length.code in REDIRECTS:
                        moved.append(place)
                    elif length.code == "WRONGTYPE":
                        garbled[block.place] = "a part is no string but something else"
                    else:
                        raise length.translated()
                elif length is None:
                    missing.add(block.place)
                elif length == len(room):
                    connection.receive_into(room)
                    connection.end_bulk()
                else:
                    connection.skip(length)
                    connection.end_bulk()
                    garbled[block.place] = f"a part of {length} bytes where {len(room)} belong"
            return moved

        moved = servers.exchange(names, lambda places: self._gets(names, places), receive, timeout_s)
        on_the_move = {parts[place][0].place for place in moved}
        self.found.num_moved += len(on_the_move)
        for block in self._large:
            if block.place in missing:
                self.found.to_drop += [self._names[block.place], *self._part_names(block)]
            elif block.place not in on_the_move:
                self._finish_large(block, garbled.get(block.place))

    def _finish_large(self, block: _Arriving, reason: str | None) -> None:
        try:
            if reason is not None:
                raise CorruptBlockError(reason)
            self._finish(block)
        except CorruptBlockError as error:
            self._drop(block.place, str(error))
            self.found.to_drop += self._part_names(block)

    def _part_names(self, block: _Arriving) -> list[bytes]:
        num_parts = -(-block.header.stored_length // self._max_value_bytes)
        return part_names(self._names[block.place], block.header.checksum, num_parts)

    def _drop(self, place: int, reason: str) -> None:
        self.found.corrupt.append(reason)
        self.found.to_drop.append(self._names[place])
