"""Which blocks may have come to a tier or gone from it, for those who tell others what an engine has."""

from collections.abc import Iterable, Iterator, Sequence

from kvtier.identity.keys import BlockKey


class ContentChanges:
    """The directory's notes, for whoever takes them regularly. Scheduler thread only.

    A note only says where to look: what was noted twice is looked at once, and what has come and gone in between was
    never there. Who compares, for each, `Directory.has` with what he has told others, tells them what is so.
    """

    def __init__(self, tiers: Sequence[str]) -> None:
        """:param tiers: whose changes are noted."""
        self.tiers = tuple(tiers)
        self._noted: dict[str, dict[BlockKey, None]] = {}
        """By tier, in the order of their first notes."""

    def __bool__(self) -> bool:
        return bool(self._noted)

    def note(self, tier: str, keys: Iterable[BlockKey]) -> None:
        """These may have come or gone. Those that did neither may be noted, too."""
        self._noted.setdefault(tier, {}).update(dict.fromkeys(keys))

    def take(self) -> Iterator[tuple[str, BlockKey]]:
        """Tier and key of what was noted since the last call."""
        noted, self._noted = self._noted, {}
        return ((tier, key) for tier, keys in noted.items() for key in keys)
