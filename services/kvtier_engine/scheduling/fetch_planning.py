"""What the tiers below the device are asked for, and how much of it is fetched."""

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.clock import MONOTONIC, Clock
from kvtier.offload import BlockStatus, Hierarchy, PrefixTokens
from kvtier.system.logs import within_request
from kvtier.tiers.base import Status
from kvtier_engine.scheduling.fetchable import Fetchable
from kvtier_engine.scheduling.request import Lookup, Request
from kvtier_engine.scheduling.windowed_blocks import WindowedBlocks

_NOTHING = contextlib.nullcontext()
_HERE = (Status.HIT,)
_HERE_SOON = (Status.HIT, Status.PENDING)


@dataclass(frozen=True, slots=True)
class PendingPolicy:
    """What to do about blocks that somebody is just writing to a tier."""

    wait_s: float = 0.05
    """They are asked for again as long as this; then they count as missing. Small computes what is about to arrive,
    large delays requests for it."""
    ask_every_s: float = 0.005


class FetchPlanning:
    """One lookup of a waiting request, kept in the request. Scheduler thread only; nothing blocks."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        windowed: WindowedBlocks,
        tokens_per_block: int,
        pending: PendingPolicy | None = None,
        tokens: PrefixTokens | None = None,
        clock: Clock = MONOTONIC,
    ) -> None:
        """
        :param hierarchy: stays the caller's.
        :param windowed: finds blocks of windowed groups among the same device blocks.
        :param tokens: counts what requests ask the hierarchy for; None: nobody looks.
        """
        self._hierarchy, self._pending, self._clock = hierarchy, pending or PendingPolicy(), clock
        self._windowed = windowed
        self._tokens_per_block, self._tokens = tokens_per_block, tokens

    def num_to_fetch(self, request: Request, num_hits: int, num_here: int, max_hits: int) -> int | None:
        """Returns how many blocks fetching adds to the prefix that is on the device; None while that is not known.

        :param num_hits: the length of the longest prefix that is on the device.
        :param num_here: how many leading blocks the device has of the full group, at least as many.
        """
        if num_hits >= max_hits:
            return 0
        lookup = request.lookup
        # Eviction may have taken device hits that were not asked for.
        if lookup is None or num_hits < lookup.first_block:
            self.cancel(request)
            lookup = request.lookup = self._asked(request, range(num_hits, max_hits), range(1))
        fetchable = Fetchable(request, lookup, num_here, self._windowed)
        if not self._is_answered(request, lookup) or not self._knows_windows(fetchable, num_hits, max_hits):
            return None
        most = fetchable.longest(max_hits, _HERE)
        is_coming = most < max_hits and fetchable.longest(max_hits, _HERE_SOON) > max(most, num_hits)
        if self._worth_asking_again(request, is_coming):
            if self._clock() - lookup.asked_at >= self._pending.ask_every_s:
                request.lookup = None
            return None
        return self._num_worth_fetching(fetchable, num_hits, most)

    def count_asked(self, request: Request, num_asked: int) -> None:
        """Counts what the tiers below were asked for, once for each request.

        :param num_asked: how many blocks the request needs beyond the prefix that is on the device.
        """
        lookup = request.lookup
        if self._tokens is not None and lookup is not None and num_asked and not request.counted:
            self._tokens.note_lookup(num_asked, lookup.found, lookup.num_wanted, self._tokens_per_block)

    def count_loaded(self, tiers: Sequence[str], num_good: int) -> None:
        """Counts a load of blocks from these tiers, of which the first `num_good` have arrived."""
        if self._tokens is not None:
            self._tokens.note_load(tiers, num_good, self._tokens_per_block)

    def cancel(self, request: Request) -> None:
        """Forgets what was asked and answered."""
        if request.lookup is not None:
            self._cancel(request.lookup)
            self._cancel(request.lookup.windows)
        request.lookup = None

    def _asked(self, request: Request, span: range, groups: range) -> Lookup:
        """A lookup of these KV groups' blocks at these positions."""
        keys = request.keys[span.start : span.stop]
        if groups.start:
            keys = [key for position in span for key in self._windowed.keys(request, position)]
        previous = request.previous_keys(span, self._tokens_per_block, groups)
        if request.spans is not None:
            request.spans.enter("lookup", blocks=len(keys))
        with within_stage(request), within_request(request.log_id):
            ticket = self._hierarchy.start_lookup(keys, previous)
        return Lookup(span.start, self._clock(), ticket)

    def _is_answered(self, request: Request, lookup: Lookup) -> bool:
        if lookup.ticket is not None:
            statuses = self._hierarchy.poll_lookup(lookup.ticket)
            if statuses is None:
                return False
            lookup.ticket, lookup.statuses = None, statuses
            if request.spans is not None:
                request.spans.note(**_hits_by_tier(statuses))
                request.spans.enter("queue")
        return True

    def _knows_windows(self, fetchable: Fetchable, num_hits: int, max_hits: int) -> bool:
        """Whether windowed groups have answered for all that may be of use: the last window of what full layers have,
        and where that is not there, or not yet, all windows."""
        request, lookup, windowed = fetchable.request, fetchable.lookup, self._windowed
        end = fetchable.num_full(max_hits, _HERE_SOON) if windowed.num_groups else num_hits
        last = windowed.first_needed(end)
        for first in (last, min(last, windowed.first_needed(num_hits + 1))) if end > num_hits else ():
            if fetchable.longest(max_hits, _HERE) == end:
                break
            if lookup.windows is None or first < lookup.windows.first_block:
                self._cancel(lookup.windows)
                lookup.windows = self._asked(request, range(first, end), range(1, 1 + windowed.num_groups))
            if not self._is_answered(request, lookup.windows):
                return False
        return True

    def _cancel(self, lookup: Lookup | None) -> None:
        if lookup is not None and lookup.ticket is not None:
            self._hierarchy.cancel_lookup(lookup.ticket)

    def _num_worth_fetching(self, fetchable: Fetchable, num_hits: int, most: int) -> int:
        """:param most: the length of the longest prefix that can be had."""
        lookup = fetchable.lookup
        lookup.found, lookup.num_wanted = [], 0
        while most > num_hits:
            blocks = fetchable.to_fetch(most)
            tiers = {position: block.tier for position, block in reversed(blocks) if position >= num_hits}
            lookup.found = lookup.found or [tiers[position] for position in sorted(tiers)]
            num_worth = self._hierarchy.plan_fetch([block for _, block in blocks], most - num_hits)
            if num_worth == len(blocks):
                lookup.num_wanted = len(tiers)
                return most - num_hits
            # What is left out may be of a window that a shorter prefix does not need.
            most = fetchable.longest(blocks[num_worth][0], _HERE)
        return 0

    def _worth_asking_again(self, request: Request, is_coming: bool) -> bool:
        """Whether a longer prefix is being written, and not for too long."""
        if not is_coming:
            return False
        now = self._clock()
        if request.pending_since is None:
            request.pending_since = now
        return now - request.pending_since < self._pending.wait_s


def within_stage(request: Request) -> contextlib.AbstractContextManager[None]:
    """A context in which calls belong to the span of the request's present stage, if the request is traced."""
    return _NOTHING if request.spans is None else request.spans.within_stage()


def _hits_by_tier(statuses: Sequence[BlockStatus]) -> dict[str, int]:
    tiers = Counter(block.tier for block in statuses if block.status is Status.HIT)
    return {f"hits.{tier}": count for tier, count in tiers.items()}
