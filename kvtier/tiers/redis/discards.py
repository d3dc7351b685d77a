"""Telling servers of a Redis to forget blocks, and remembering those that could not be told."""

from collections.abc import Sequence
from typing import Any

from kvtier.codec.stored_form import HEADER_BYTES
from kvtier.identity.keys import StoreKey
from kvtier.tiers.redis.blocks import BlockFormat
from kvtier.tiers.redis.commands import key_names
from kvtier.tiers.redis.exchange import Accepts, Conversation, is_wrong_type
from kvtier.tiers.redis.presence import presence
from kvtier.tiers.redis.undone import UndoneDiscards


class Discards:
    """Blocks to be forgotten in one call. What it collects is only appended to, by a thread for each server."""

    def __init__(
        self, keys: Sequence[StoreKey], form: BlockFormat, undone: UndoneDiscards, *, num_small: int = 0
    ) -> None:
        """
        :param undone: where keys are listed that servers have not heard of; these are taken off it as they do.
        :param num_small: how many blocks, from the first on, are known to have one value each.
        """
        self.names = key_names(keys)
        self.parts: list[bytes] = []
        """Names of the parts after the first, of blocks in parts: to be dropped as well."""
        self._keys = keys
        self._form = form
        self._undone = undone
        self._num_small = num_small
        self._removed: list[tuple[int, int]] = []
        """The places of which a server has heard, and how many blocks were there."""

    @property
    def num_removed(self) -> int:
        """How many of the blocks were there."""
        return sum(count for _, count in self._removed)

    @property
    def untold(self) -> list[StoreKey]:
        """The blocks of which no server has heard."""
        told = {place for place, _ in self._removed}
        return [key for place, key in enumerate(self._keys) if place not in told]

    def work(self, talk: Conversation, places: list[int]) -> list[int]:
        """Tells one server; gives the places that have moved. Raises what the server refuses with. Most of a
        large discard is not there: the server is told of that by asking for it."""
        return self._tell(talk, places, is_wrong_type)

    def repeat(self, talk: Conversation, places: list[int]) -> list[int]:
        """`work` before another call's own: what the server refuses is asked again next time."""
        return self._tell(talk, places, lambda refusal: True)

    def _tell(self, talk: Conversation, places: list[int], accepts: Accepts) -> list[int]:
        found = presence(talk, [self.names[place] for place in places], accepts)
        there = [places[i] for i in found.there]
        self._note_told([places[i] for i in found.absent], 0)
        names = [self.names[place] for place in there]
        large = [self.names[place] for place in there if place >= self._num_small]

        def take_head(i: int, head: Any) -> None:
            if isinstance(head, bytes):
                self.parts.extend(self._form.further_parts(large[i], head))

        def take_count(i: int, count: Any) -> None:
            if isinstance(count, int):
                self._note_told([there[i]], count)

        talk.ask([("GETRANGE", name, 0, HEADER_BYTES - 1) for name in large], take_head, accepts)
        moved = [there[i] for i in talk.ask([("UNLINK", name) for name in names], take_count, accepts)]
        return [places[i] for i in found.moved] + moved

    def _note_told(self, places: Sequence[int], count: int) -> None:
        """A server has heard of these places, and has removed `count` values at each."""
        self._removed.extend((place, count) for place in places)
        self._undone.done([self._keys[place] for place in places])
