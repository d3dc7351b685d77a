"""Which blocks may have come to a tier or gone from it, for those that tell others what an engine has."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from kvtier.identity.keys import BlockKey


class ContentChanges:
    """The directory's notes, to be taken regularly. Scheduler thread only.

    A note is a hint: what was noted twice is taken once, and may have come and gone in between. Compare `Directory.has`
    with what was published before publishing anything.
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
        """Returns the tiers and keys that were noted since the last call."""
        noted, self._noted = self._noted, {}
        return ((tier, key) for tier, keys in noted.items() for key in keys)


class ChainedBlock(Protocol):
    """A block as events describe it."""

    @property
    def block_hash(self) -> Hashable: ...

    @property
    def parent_hash(self) -> Hashable | None: ...

    @property
    def position(self) -> int:
        """The block's number in its prompt."""

    @property
    def family(self) -> Hashable:
        """What all blocks of one event have in common."""


_Block = TypeVar("_Block", bound=ChainedBlock)


def runs_of_chains(blocks: Iterable[_Block]) -> list[list[_Block]]:
    """Joins blocks that follow each other. Parents come before children: routers place a block by its parent."""
    runs: list[list[_Block]] = []
    open_runs: dict[tuple[Hashable, Hashable], list[_Block]] = {}
    """Runs that may go on, by what the next block has in common with them."""
    for block in sorted(blocks, key=lambda each: each.position):
        run = open_runs.pop((block.family, block.parent_hash), None)
        if run is None:
            run = []
            runs.append(run)
        run.append(block)
        open_runs[block.family, block.block_hash] = run
    return runs
