"""Reading blocks from a Redis: each is verified as it arrives, and copied to where it belongs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtier.codec.sealing import SEAL_BYTES
from kvtier.codec.stored_form import HEADER_BYTES, Codec, Header, parse_stored_header, verify
from kvtier.errors import CorruptBlockError, InvalidInputError, SealedBlockError, SealFault
from kvtier.identity.keys import StoreKey
from kvtier.tiers.redis.blocks import BlockFormat
from kvtier.tiers.redis.commands import MAX_PARTS, get, part_names
from kvtier.tiers.redis.exchange import Conversation, Take, is_wrong_type, takes_no_writes
from kvtier.tiers.redis.servers import Servers


@dataclass(frozen=True, slots=True)
class _Large:
    """A block whose first part is there."""

    place: int
    header: Header
    stored: memoryview
    """The memory in which the payload as stored is put together."""


class BlockReader:
    """One call's reads. Its methods run on a thread for each server; what they share is only appended to."""

    def __init__(
        self, keys: Sequence[StoreKey], names: Sequence[bytes], into: Sequence[memoryview], form: BlockFormat
    ) -> None:
        """:param into: one buffer for each key; its content is undefined afterwards where there is no hit."""
        self.hits: list[int] = []
        """Places of blocks that are verified."""
        self.corrupt: list[str] = []
        """What is wrong with blocks that do not hold."""
        self.to_drop: list[bytes] = []
        """Names of values that are corrupt, or of no use without parts that are gone."""
        self.names = names
        self._keys, self._into = keys, into
        self._form = form
        self._large: list[_Large] = []
        self._has_stray = False
        """Whether a block in parts was found to be of another length than was asked for."""

    def read_firsts(self, talk: Conversation, places: list[int]) -> list[int]:
        """Reads whole blocks, and the first parts of large ones, from one server; gives the places that have moved."""
        return self._get(talk, self.names, places, lambda i, value: self._take_first(places[i], value))

    def read_parts(self, servers: Servers, deadline: float) -> int:
        """Reads the other parts of large blocks, if there are any; gives how many parts were on the move."""
        step = self._form.max_value_bytes
        names = [name for block in self._large for name in self._part_names(block)]
        parts = [
            (block.place, block.stored[start : start + step])
            for block in self._large
            for start in range(step, len(block.stored), step)
        ]
        arrived: set[int] = set()
        gone: set[int] = set()
        garbled: dict[int, str] = {}

        def take(part: int, value: Any) -> None:
            place, room = parts[part]
            if value is None:
                gone.add(place)
            elif not isinstance(value, bytes):
                garbled[place] = "a part is no string but something else"
            elif len(value) != len(room):
                garbled[place] = f"a part of {len(value)} bytes where {len(room)} belong"
            else:
                room[:] = value
            arrived.add(part)

        def work(talk: Conversation, batch: list[int]) -> list[int]:
            return self._get(talk, names, batch, lambda i, value: take(batch[i], value))

        num_moved = servers.each("read", names, [len(room) for _, room in parts], work, deadline)
        unanswered = {place for part, (place, _) in enumerate(parts) if part not in arrived}
        for block in self._large:
            if block.place in gone:
                self.to_drop += [self.names[block.place], *self._part_names(block)]
            elif block.place not in unanswered:
                self._finish_large(block, garbled.get(block.place))
        return num_moved

    def _get(self, talk: Conversation, names: Sequence[bytes], places: list[int], take: Take) -> list[int]:
        refused: list[int] = []

        def take_unless_refused(i: int, value: Any) -> None:
            if takes_no_writes(value):
                refused.append(i)
            else:
                take(i, value)

        commands = (get(names[place], self._form.ttl_ms) for place in places)
        moved = talk.ask(commands, take_unless_refused, _is_taken)
        if refused:  # to let a value live on is to write, and the server takes no writes
            plain = (get(names[places[i]], 0) for i in refused)
            moved += [refused[i] for i in talk.ask(plain, lambda i, value: take(refused[i], value), is_wrong_type)]
        return [places[i] for i in moved]

    def _take_first(self, place: int, value: Any) -> None:
        if value is None:
            return
        try:
            if is_wrong_type(value):
                raise CorruptBlockError("no string but something else lies there")
            if not isinstance(value, bytes):
                raise InvalidInputError(f"the Redis answers {value!r} where a string belongs")
            header, stored = parse_stored_header(value), memoryview(value)[HEADER_BYTES:]
            self._require_fitting(header, place, len(stored))
            if header.stored_length == len(stored):
                self._finish(place, header, stored)
            else:
                self._begin_large(place, header, stored)
        except CorruptBlockError as error:
            self._drop(place, error)

    def _require_fitting(self, header: Header, place: int, length: int) -> None:
        limit = self._form.max_value_bytes
        if header.key != self._keys[place]:
            raise CorruptBlockError("block of another key")
        if length != min(header.stored_length, limit):
            raise CorruptBlockError(f"truncated or too long: {length} bytes where {header.stored_length} are stored")
        if header.stored_length > max(len(self._into[place]) + SEAL_BYTES, MAX_PARTS * limit):
            raise CorruptBlockError(f"a block of {header.stored_length} bytes is none of ours")

    def _begin_large(self, place: int, header: Header, first: memoryview) -> None:
        into = self._into[place]
        fits = header.raw_length == len(into)
        if not fits:
            # A miss in any case; but if it is its header that does not hold, the block must go, or it is one for ever.
            if self._has_stray:
                return  # one at a time: nobody has made room for more
            self._has_stray = True
        in_place = fits and header.codec is Codec.RAW and not header.key_id
        # Memory of numpy is touched only where something comes: the length may be garbled.
        stored = into if in_place else np.empty(header.stored_length, dtype=np.uint8).data
        stored[: len(first)] = first
        self._large.append(_Large(place, header, stored))

    def _finish(self, place: int, header: Header, stored: memoryview) -> None:
        """Verifies the payload as stored. A block of another length than was asked for is a miss, but in order."""
        into = self._into[place]
        if header.raw_length == len(into):
            self._form.packer.decode_into(header, self._keys[place], stored, into)
            self.hits.append(place)
        else:
            verify(header, self._keys[place], stored)

    def _finish_large(self, block: _Large, reason: str | None) -> None:
        try:
            if reason is not None:
                raise CorruptBlockError(reason)
            self._finish(block.place, block.header, block.stored)
        except CorruptBlockError as error:
            if self._drop(block.place, error):
                self.to_drop += self._part_names(block)

    def _part_names(self, block: _Large) -> list[bytes]:
        return part_names(
            self.names[block.place], block.header.fingerprint, self._form.num_parts(block.header.stored_length)
        )

    def _drop(self, place: int, error: CorruptBlockError) -> bool:
        """False: a block that somebody else can open, who has got a new key before us, stays."""
        if isinstance(error, SealedBlockError) and error.fault is SealFault.NEWER_KEY:
            return False
        self.corrupt.append(str(error))
        self.to_drop.append(self.names[place])
        return True


def _is_taken(refusal: object) -> bool:
    return is_wrong_type(refusal) or takes_no_writes(refusal)
