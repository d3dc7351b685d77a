"""How much of a request's prefix is worth loading: asked of the directory, then of the planner."""

from collections.abc import Sequence
from functools import partial

from kvtier.clock import Clock
from kvtier.identity.keys import BlockKey
from kvtier.offload import Directory, Planner, PreviousKeys
from kvtier.offload.planner import PENDING, BlockStatus
from kvtier.system.logs import within_request
from kvtier.tiers.base import Status
from kvtier_vllm.kv.groups import KVGroups
from kvtier_vllm.requests.keys import RequestKeys
from kvtier_vllm.requests.known_requests import KnownRequest, PrefixLookup

_ASK_EVERY_S = 0.005
_HERE = frozenset((Status.HIT,))
_HERE_SOON = frozenset((Status.HIT, Status.PENDING))


class RequestLookups:
    """One lookup per request at a time, polled as vLLM asks. Scheduler thread only; nothing blocks."""

    def __init__(  # noqa: PLR0913 - the parts that it is put together from
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
            request = known.request.request_id
            with known.trace.within("lookup", blocks=len(wanted)), within_request(request):
                lookup.ticket = self._directory.start_lookup(keys, self._previous(known.keys, wanted.start))
        if lookup.ticket is not None:
            statuses = self._directory.poll_lookup(lookup.ticket)
            if statuses is None:
                return None
            lookup.ticket = None
            tiers, found, is_pending = self._hit(statuses)
            if is_pending and self._is_worth_waiting(lookup):
                lookup.asked = range(0)
                return None
            lookup.tiers, lookup.found = tiers, found
            known.trace.end(hits=len(tiers))
        return len(lookup.tiers or ())

    def forget(self, known: KnownRequest) -> None:
        """What was asked of it holds no longer."""
        lookup = known.lookup
        if lookup.ticket is not None:
            self._directory.cancel_lookup(lookup.ticket)
        lookup.asked, lookup.ticket, lookup.tiers, lookup.found = range(0), None, None, []

    def _previous(self, keys: RequestKeys, start: int) -> list[PreviousKeys]:
        """What previous secrets make of the keys of all groups, from the block at this position on."""
        num_groups = self._groups.num_groups

        def first_of(previous: RequestKeys, num_keys: int) -> list[BlockKey]:
            return self._groups.keys(previous.first(start + num_keys // num_groups)[start:])

        return [
            PreviousKeys(hasher, partial(first_of, previous), keys_per_block=num_groups)
            for hasher, previous in keys.previous()
        ]

    def _hit(self, statuses: Sequence[BlockStatus]) -> tuple[list[str], list[str], bool]:
        """Returns where each block worth loading is, where each block of the whole hit is, and whether it is worth
        waiting for more that are on their way.

        A hit is what all groups have: KV of every block, and states at the end of the last one.

        :param statuses: of all groups, block by block.
        """
        of_tokens, num_groups = self._groups.of_tokens, self._groups.num_groups
        blocks = [statuses[start : start + num_groups] for start in range(0, len(statuses), num_groups)]
        kv = [block[group] for block in blocks for group in of_tokens]
        num_kv = self._planner.blocks_to_fetch(kv)
        num_hits = self._usable(blocks[: num_kv // len(of_tokens)], _HERE)
        if PENDING in kv[num_kv : num_kv + 1]:
            num_kv = next((n for n, status in enumerate(kv) if status.status is Status.MISS), len(kv))
        num_awaited = self._usable(blocks[: num_kv // len(of_tokens)], _HERE_SOON)
        num_here = next((n for n, status in enumerate(kv) if status.status is not Status.HIT), len(kv))
        num_found = self._usable(blocks[: num_here // len(of_tokens)], _HERE)
        found = [block[of_tokens[0]].tier for block in blocks[:num_found]]
        return found[:num_hits], found, num_awaited > num_hits

    def _usable(self, blocks: Sequence[Sequence[BlockStatus]], wanted: frozenset[Status]) -> int:
        """How many of these blocks there are up to the last one at whose end all states have a wanted status."""
        for num_blocks in range(len(blocks) - self._num_volatile, 0, -1):
            if all(blocks[num_blocks - 1][group].status in wanted for group in self._groups.of_states):
                return num_blocks
        return 0

    def _is_worth_waiting(self, lookup: PrefixLookup) -> bool:
        """Whether to wait for a block on its way to a tier, e.g. because another request has begun to load it."""
        now = self._clock()
        lookup.pending_since = lookup.pending_since if lookup.pending_since is not None else now
        lookup.ask_at = now + _ASK_EVERY_S
        return now < lookup.pending_since + self._patience_s
