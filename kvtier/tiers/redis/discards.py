"""Telling servers of a Redis to forget blocks, and remembering those that could not be told."""

from collections.abc import Sequence
from typing import Any

from kvtier.codec.stored_form import HEADER_BYTES
from kvtier.identity.keys import StoreKey
from kvtier.tiers.redis.blocks import BlockFormat
from kvtier.tiers.redis.commands import key_name
from kvtier.tiers.redis.exchange import Accepts, Conversation, is_wrong_type
from kvtier.tiers.redis.undone import UndoneDiscards


class Discards:
    """Blocks to be forgotten in one call. What it collects is only appended to, by a thread for each server."""

    def __init__(self, keys: Sequence[StoreKey], form: BlockFormat, undone: UndoneDiscards) -> None:
        """:param undone: where these keys are listed; those are taken off it that a server has heard of."""
        self.names = [key_name(key) for key in keys]
        self.parts: list[bytes] = []
        """Names of the parts after the first, of blocks in parts: to be dropped as well."""
        self._keys = keys
        self._form = form
        self._undone = undone
        self._removed: list[int] = []

    @property
    def num_removed(self) -> int:
        """How many of the blocks were there."""
        return sum(self._removed)

    def work(self, talk: Conversation, places: list[int]) -> list[int]:
        """Tells one server; gives the places that have moved. Raises what the server refuses with."""
        return self._tell(talk, places, is_wrong_type)

    def repeat(self, talk: Conversation, places: list[int]) -> list[int]:
        """`work` before another call's own: what the server refuses is asked again next time."""
        return self._tell(talk, places, lambda refusal: True)

    def _tell(self, talk: Conversation, places: list[int], accepts: Accepts) -> list[int]:
        names = [self.names[place] for place in places]

        def take_head(i: int, head: Any) -> None:
            if isinstance(head, bytes):
                self.parts.extend(self._form.further_parts(names[i], head))

        def take_count(i: int, count: Any) -> None:
            if isinstance(count, int):
                self._removed.append(count)
                self._undone.done([self._keys[places[i]]])

        talk.ask([("GETRANGE", name, 0, HEADER_BYTES - 1) for name in names], take_head, accepts)
        return [places[i] for i in talk.ask([("UNLINK", name) for name in names], take_count, accepts)]
