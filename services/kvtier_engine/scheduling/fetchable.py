"""How long a prefix may be of which the device has a part, and the tiers below the rest."""

from collections.abc import Collection
from dataclasses import dataclass
from operator import itemgetter

from kvtier.offload import BlockStatus
from kvtier.offload.planner import MISSING
from kvtier.tiers.base import Status
from kvtier_engine.scheduling.request import Lookup, Request
from kvtier_engine.scheduling.windowed_blocks import WindowedBlocks


@dataclass(frozen=True, slots=True)
class Fetchable:
    """A request's blocks, those on the device beside the answers of a lookup. Good as long as neither changes."""

    request: Request
    lookup: Lookup
    num_here: int
    """How many leading blocks the device has of the full group."""
    windowed: WindowedBlocks

    def longest(self, most: int, wanted: Collection[Status]) -> int:
        """The length of the longest prefix, of at most `most` blocks, that is on the device or below with one of these
        statuses. A prefix that begins before what was asked for is none."""
        start = (self.num_here - self.lookup.first_block) * self._num_groups
        end = min(most, self.num_here)
        for block in self.lookup.statuses[start :: self._num_groups]:
            if end >= most or block.status not in wanted:
                break
            end += 1
        return self.windowed.longest(end, lambda position: self._window_is_there(position, wanted))

    def to_fetch(self, num_blocks: int) -> list[tuple[int, BlockStatus]]:
        """What a prefix of so many blocks needs that is not on the device: positions in order, and where it is."""
        start, stop = ((end - self.lookup.first_block) * self._num_groups for end in (self.num_here, num_blocks))
        found = list(
            zip(range(self.num_here, num_blocks), self.lookup.statuses[start : stop : self._num_groups], strict=False)
        )
        of_window = [
            (position, self._status(position, group))
            for position in range(self.windowed.first_needed(num_blocks), num_blocks)
            for group, key in enumerate(self.windowed.keys(self.request, position), 1)
            if key not in self.windowed
        ]
        return sorted(found + of_window, key=itemgetter(0)) if of_window else found

    @property
    def _num_groups(self) -> int:
        return 1 + self.windowed.num_groups

    def _window_is_there(self, position: int, wanted: Collection[Status]) -> bool:
        keys = enumerate(self.windowed.keys(self.request, position), 1)
        return all(key in self.windowed or self._status(position, group).status in wanted for group, key in keys)

    def _status(self, position: int, group: int) -> BlockStatus:
        if position < self.lookup.first_block:
            return MISSING
        return self.lookup.statuses[(position - self.lookup.first_block) * self._num_groups + group]
