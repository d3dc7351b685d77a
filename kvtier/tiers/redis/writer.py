"""Writing blocks to a Redis: what is there already is not sent, and a block in parts is made readable last."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.codec.stored_form import parse_stored_header
from kvtier.memory.buffers import ReadableBuffer
from kvtier.tiers.base import Item, WriteStatus
from kvtier.tiers.redis.blocks import BlockFormat
from kvtier.tiers.redis.commands import Command, set_value
from kvtier.tiers.redis.exchange import Conversation, is_full, refusal_of_writes, takes_no_writes
from kvtier.tiers.redis.presence import presence
from kvtier.tiers.redis.servers import Servers


@dataclass(frozen=True, slots=True)
class _Block:
    """A block in its stored form."""

    place: int
    head: bytes
    parts: list[memoryview]
    """The payload as stored, cut; at least one, which may be empty."""
    names: list[bytes]
    """Names of the parts after the first."""


class BlockWriter:
    """One call's writes. Its methods run on a thread for each server; what they share is only appended to or set."""

    def __init__(self, items: Sequence[Item[ReadableBuffer]], names: Sequence[bytes], form: BlockFormat) -> None:
        self.statuses = [WriteStatus.FAILED] * len(items)
        self.refusal = ""
        """What a server said that took no writes."""
        self.read_only: list[int] = []
        """Places of blocks that a server refused which can be read."""
        self.to_drop: list[bytes] = []
        """Names of parts of blocks that did not become whole, or were there already in other parts."""
        self.names = names
        self._items = items
        self._form = form
        self._large: list[int] = []
        """Places of payloads that may need parts, and are not there yet."""

    def write_small(self, talk: Conversation, places: list[int]) -> list[int]:
        """Writes blocks of one value to one server; gives the places that have moved.

        What is there already is found out first: that costs a round trip, and saves packing and sending.
        """
        found = presence(talk, [self.names[place] for place in places])
        for i in found.there:
            self.statuses[places[i]] = WriteStatus.EXISTS
        absent, moved = [places[i] for i in found.absent], [places[i] for i in found.moved]
        small = [place for place in absent if self._most_stored_bytes(place) <= self._form.max_value_bytes]
        self._large += sorted(set(absent).difference(small))
        return moved + self._set_firsts(talk, small, {})

    def write_large(self, servers: Servers, deadline: float) -> int:
        """Writes blocks that are larger than a value, if there are any; gives how many values were on the move."""
        blocks = {place: self._encoded(place) for place in sorted(self._large)}
        num_moved, lacking = self._write_parts(servers, list(blocks.values()), deadline)
        whole = [place for place in blocks if place not in lacking]
        needed = {name for place in whole for name in blocks[place].names}  # a batch may name a key twice
        self.to_drop += [name for block in blocks.values() for name in block.names if name not in needed]

        def work(talk: Conversation, batch: list[int]) -> list[int]:
            moved = set(self._set_firsts(talk, [whole[i] for i in batch], blocks))
            return [i for i in batch if whole[i] in moved]

        names, sizes = [self.names[place] for place in whole], [len(blocks[place].parts[0]) for place in whole]
        num_moved += servers.each("write", names, sizes, work, deadline)
        self.to_drop += [name for place in whole if self._is_useless(blocks[place]) for name in blocks[place].names]
        return num_moved

    def _is_useless(self, block: _Block) -> bool:
        """Whether nobody will read the parts that were written of a block: each time that a block is sealed, its parts
        have other names than those of what is there. All writers of a plain block share the names of its parts."""
        is_refused = self.statuses[block.place] in (WriteStatus.EXISTS, WriteStatus.FULL)
        return is_refused and parse_stored_header(block.head).key_id != 0

    def _write_parts(self, servers: Servers, blocks: Sequence[_Block], deadline: float) -> tuple[int, set[int]]:
        """The parts after the first, last to first: how many moved, and the places of blocks that lack one."""
        parts = [(block, i) for block in blocks for i in reversed(range(len(block.names)))]
        there: set[int] = set()

        def work(talk: Conversation, batch: list[int]) -> list[int]:
            def take(i: int, answer: Any) -> None:
                if code := refusal_of_writes(answer):
                    self._refuse(parts[batch[i]][0].place, code, answer)
                else:
                    there.add(batch[i])

            commands = (
                set_value(block.names[i], bytes(block.parts[i + 1]), self._form.ttl_ms, anew=False)
                for block, i in (parts[number] for number in batch)
            )
            return [batch[i] for i in talk.ask(commands, take, takes_no_writes)]

        names = [block.names[i] for block, i in parts]
        num_moved = servers.each("write", names, [len(block.parts[i + 1]) for block, i in parts], work, deadline)
        return num_moved, {block.place for number, (block, _) in enumerate(parts) if number not in there}

    def _set_firsts(self, talk: Conversation, places: Sequence[int], blocks: dict[int, _Block]) -> list[int]:
        """Sends what makes blocks readable; gives the places that have moved.

        :param blocks: those that are encoded already.
        """

        def commands() -> Iterator[Command]:
            for place in places:
                block = blocks.get(place) or self._encoded(place)
                value = b"".join((block.head, block.parts[0]))
                yield set_value(self.names[place], value, self._form.ttl_ms, anew=True)

        def take(i: int, answer: Any) -> None:
            if code := refusal_of_writes(answer):
                self._refuse(places[i], code, answer)
            else:
                self.statuses[places[i]] = WriteStatus.EXISTS if answer is None else WriteStatus.STORED

        return [places[i] for i in talk.ask(commands(), take, takes_no_writes)]

    def _most_stored_bytes(self, place: int) -> int:
        key, payload, _ = self._items[place]
        return self._form.packer.most_stored_bytes(key, len(payload))

    def _encoded(self, place: int) -> _Block:
        head, payload_as_stored = self._form.packer.encode(*self._items[place])
        stored = memoryview(payload_as_stored)
        step = self._form.max_value_bytes
        parts = [stored[start : start + step] for start in range(0, len(stored) or 1, step)]
        return _Block(place, head, parts, self._form.further_parts(self.names[place], head))

    def _refuse(self, place: int, code: str, refusal: Exception) -> None:
        full = is_full(refusal)
        self.statuses[place] = WriteStatus.FULL if full else WriteStatus.FAILED
        if not full:
            self.read_only.append(place)
        self.refusal = f"{code} {str(refusal).removeprefix(code).lstrip()}"
