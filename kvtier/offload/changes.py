"""Which blocks may have come to a tier or gone from it, for those that tell others what an engine has."""

from collections.abc import Iterable, Iterator, Sequence

from kvtier.identity.keys import BlockKey


class ContentChanges:
    """The directory's notes, to be taken regularly. Scheduler thread only.

    A note is a hint: what was noted twice is taken once, and what has come and gone in between was never there. Compare
    `Directory.has` with what was published before publishing anything.
    """

    def __init__(self, tiers: Sequence[str]) -> None:
        """:param tiers: whose changes are noted."""
        self.tiers = tuple(tiers)
        self._noted: dict[str, dict[BlockKey, None]] = {}
        """The noted keys by tier, in the order of their first notes."""

    def __bool__(self) -> bool:
        return bool(self._noted)

    def note(self, tier: str, keys: Iterable[BlockKey]) -> None:
        """Notes that these blocks may have come or gone. Blocks that did neither may be noted, too."""
        self._noted.setdefault(tier, {}).update(dict.fromkeys(keys))

    def take(self) -> Iterator[tuple[str, BlockKey]]:
        """Tier and key of what was noted since the last call."""
        noted, self._noted = self._noted, {}
        return ((tier, key) for tier, keys in noted.items() for key in keys)
