"""How long a prefix may be of which the device has a part, and the tiers below the rest."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
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

    def num_full(self, most: int, wanted: Collection[Status]) -> int:
        """How many leading blocks, of at most `most`, are on the device or below with one of these statuses, as far as
        full layers need them."""
        end = min(most, self.num_here)
        for block in self.lookup.statuses[self.num_here - self.lookup.first_block :]:
            if end >= most or block.status not in wanted:
                break
            end += 1
        return end

    def longest(self, most: int, wanted: Collection[Status]) -> int:
        """The length of the longest prefix, of at most `most` blocks, of which that is true, and of whose last window
        it is true for other layers. What these were not asked for is not there."""
        is_there = partial(self._window_is_there, wanted=wanted)
        return self.windowed.longest(self.num_full(most, wanted), is_there)

    def to_fetch(self, num_blocks: int) -> list[tuple[int, BlockStatus]]:
        """What a prefix of so many blocks needs that is not on the device: positions in order, and where it is."""
        first = self.lookup.first_block
        full = self.lookup.statuses[self.num_here - first : max(self.num_here, num_blocks) - first]
        found = list(enumerate(full, self.num_here))
        of_window = [
            (position, self._in_window(position, group))
            for position in range(self.windowed.first_needed(num_blocks), num_blocks)
            for group, key in enumerate(self.windowed.keys(self.request, position))
            if key not in self.windowed
        ]
        return sorted(found + of_window, key=itemgetter(0)) if of_window else found

    def _window_is_there(self, position: int, wanted: Collection[Status]) -> bool:
        keys = enumerate(self.windowed.keys(self.request, position))
        return all(key in self.windowed or self._in_window(position, group).status in wanted for group, key in keys)

    def _in_window(self, position: int, group: int) -> BlockStatus:
        """:param group: among the windowed ones."""
        windows = self.lookup.windows
        if windows is None or position < windows.first_block:
            return MISSING
        place = (position - windows.first_block) * self.windowed.num_groups + group
        return windows.statuses[place] if place < len(windows.statuses) else MISSING
