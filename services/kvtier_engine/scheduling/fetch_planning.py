"""What the tiers below the device are asked for, and how much of it is fetched."""

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from kvtier.clock import MONOTONIC, Clock
from kvtier.offload import BlockStatus, Hierarchy, PrefixTokens
from kvtier.system.logs import within_request
from kvtier.tiers.base import Status
from kvtier_engine.scheduling.request import Lookup, Request

_NOTHING = contextlib.nullcontext()


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
        tokens_per_block: int,
        pending: PendingPolicy | None = None,
        tokens: PrefixTokens | None = None,
        clock: Clock = MONOTONIC,
    ) -> None:
        """
        :param hierarchy: stays the caller's.
        :param tokens: counts what requests ask the hierarchy for; None: nobody looks.
        """
        self._hierarchy, self._pending, self._clock = hierarchy, pending or PendingPolicy(), clock
        self._tokens_per_block, self._tokens = tokens_per_block, tokens

    def num_to_fetch(self, request: Request, num_hits: int, max_hits: int) -> int | None:
        """Blocks worth fetching after the first `num_hits`; None while that is not known."""
        if num_hits >= max_hits:
            return 0
        lookup = request.lookup
        # Eviction may have taken device hits that were not asked for.
        if lookup is None or num_hits < lookup.first_block:
            self.cancel(request)
            previous = request.previous_keys(range(num_hits, max_hits), self._tokens_per_block)
            if request.spans is not None:
                request.spans.enter("lookup", blocks=max_hits - num_hits)
            with within_stage(request), within_request(request.log_id):
                ticket = self._hierarchy.start_lookup(request.keys[num_hits:max_hits], previous)
            lookup = request.lookup = Lookup(num_hits, self._clock(), ticket)
        if lookup.ticket is not None:
            statuses = self._hierarchy.poll_lookup(lookup.ticket)
            if statuses is None:
                return None
            lookup.ticket, lookup.statuses = None, statuses
            if request.spans is not None:
                request.spans.note(**_hits_by_tier(statuses))
                request.spans.enter("queue")
        statuses = lookup.statuses[num_hits - lookup.first_block :]
        if self._worth_asking_again(request, [block.status for block in statuses]):
            if self._clock() - lookup.asked_at >= self._pending.ask_every_s:
                request.lookup = None
            return None
        return self._hierarchy.plan_fetch(statuses)

    def count_asked(self, request: Request, asked: range, num_fetched: int) -> None:
        """Counts what the tiers below were asked for, once for each request.

        :param asked: the positions of the blocks that the request needs and the device does not have.
        """
        if self._tokens is None or request.lookup is None or request.counted:
            return
        statuses = request.lookup.statuses[asked.start - request.lookup.first_block :]
        found = [block.tier for block in takewhile(lambda block: block.status is Status.HIT, statuses)]
        self._tokens.note_lookup(len(asked), found, num_fetched, self._tokens_per_block)

    def count_loaded(self, tiers: Sequence[str], num_good: int) -> None:
        """Counts a load of blocks from these tiers, of which the first `num_good` have arrived."""
        if self._tokens is not None:
            self._tokens.note_load(tiers, num_good, self._tokens_per_block)

    def cancel(self, request: Request) -> None:
        """Forgets what was asked and answered."""
        if request.lookup is not None and request.lookup.ticket is not None:
            self._hierarchy.cancel_lookup(request.lookup.ticket)
        request.lookup = None

    def _worth_asking_again(self, request: Request, statuses: Sequence[Status]) -> bool:
        """Whether the leading hits end in a block that is being written, and not for too long."""
        first_other = next((status for status in statuses if status is not Status.HIT), None)
        if first_other is not Status.PENDING:
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
