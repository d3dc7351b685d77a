"""How long a prefix may be of which the device has a part, and the tiers below the rest."""

from collections.abc import Collection
from dataclasses import dataclass

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

    def to_fetch(self, start: int, num_blocks: int) -> list[tuple[int, BlockStatus]]:
        """What a prefix of so many blocks needs that is not on the device: positions in order, and where it is.

        :param start: the length of the longest prefix that is on the device.
        """
        first = self.windowed.first_needed(num_blocks)
        found: list[tuple[int, BlockStatus]] = []
        for position in range(min(start, first), num_blocks):
            if position >= self.num_here:
                found.append((position, self._status(position, 0)))
            if position >= first:
                keys = enumerate(self.windowed.keys(self.request, position), 1)
                found += [(position, self._status(position, group)) for group, key in keys if key not in self.windowed]
        return found

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
