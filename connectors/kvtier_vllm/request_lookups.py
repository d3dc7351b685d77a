"""How much of a request's prefix is worth loading: asked of the directory, then of the planner."""

from kvtier.clock import Clock
from kvtier.hierarchy import Directory, Planner
from kvtier.hierarchy.planner import PENDING
from kvtier_vllm.groups import KVGroups
from kvtier_vllm.known_requests import KnownRequest, PrefixLookup

_ASK_EVERY_S = 0.005


class RequestLookups:
    """One lookup per request at a time, polled as vLLM asks. Scheduler thread only; nothing blocks."""

    def __init__(
        self,
        directory: Directory,
        planner: Planner,
        groups: KVGroups,
        *,
        tokens_per_block: int,
        num_volatile_blocks: int,
        patience_s: float,
        clock: Clock,
    ) -> None:
        """
        :param num_volatile_blocks: at the end of a hit, which are computed again.
        :param patience_s: how long a request waits for blocks that are on their way to a tier.
        """
        self._directory, self._planner, self._groups = directory, planner, groups
        self._size, self._num_volatile = tokens_per_block, num_volatile_blocks
        self._patience_s, self._clock = patience_s, clock

    def match(self, known: KnownRequest, num_computed_tokens: int) -> int | None:
        """Blocks beyond the computed ones that are worth loading; None: ask again."""
        if known.is_tombstoned or num_computed_tokens % self._size:
            return 0
        # The last token is computed in any case: its logits are wanted.
        wanted = range(num_computed_tokens // self._size, (known.request.num_tokens - 1) // self._size)
        if not wanted:
            return 0
        lookup = known.lookup
        if lookup.asked != wanted:
            if self._clock() < lookup.ask_at:
                return None
            self.forget(known)
            lookup.asked = wanted
            keys = self._groups.keys(known.keys.first(wanted.stop)[wanted.start :])
            lookup.ticket = self._directory.start_lookup(keys)
        if lookup.ticket is not None:
            statuses = self._directory.poll_lookup(lookup.ticket)
            if statuses is None:
                return None
            lookup.ticket = None
            num_hits = self._planner.blocks_to_fetch(statuses)
            if PENDING in statuses[num_hits : num_hits + 1] and self._is_worth_waiting(lookup):
                lookup.asked = range(0)
                return None
            # A hit is what all groups have.
            num_hits = max(0, num_hits // self._groups.num_groups - self._num_volatile)
            lookup.tiers = [status.tier for status in statuses[:: self._groups.num_groups][:num_hits]]
        return len(lookup.tiers or ())

    def forget(self, known: KnownRequest) -> None:
        """What was asked of it holds no longer."""
        lookup = known.lookup
        if lookup.ticket is not None:
            self._directory.cancel_lookup(lookup.ticket)
        lookup.asked, lookup.ticket, lookup.tiers = range(0), None, None

    def _is_worth_waiting(self, lookup: PrefixLookup) -> bool:
        """For a block that is on its way to a tier, e.g. because another request has begun to load it."""
        now = self._clock()
        lookup.pending_since = lookup.pending_since if lookup.pending_since is not None else now
        lookup.ask_at = now + _ASK_EVERY_S
        return now < lookup.pending_since + self._patience_s
