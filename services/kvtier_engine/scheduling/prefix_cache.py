"""Blocks for requests: from the device, from the tiers below, or fresh; and full blocks back down.

One start of a request: lookup (polled) -> device hits and fetched blocks and fresh ones, all at once ->
load (polled) -> running. After each step, full blocks get their keys and go down in one batch.
"""

import contextlib
import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from kvtier.clock import MONOTONIC, Clock
from kvtier.device.block_pool import BlockPool
from kvtier.identity.keys import BlockKey
from kvtier.offload import Block, BlockStatus, Cleaner, Hierarchy, JobResult, PrefixTokens
from kvtier.system.tracing import NO_CONTEXT, tracing
from kvtier.tiers.base import Status
from kvtier_engine.scheduling.request import Lookup, Request

DEVICE = "device"
_NOTHING = contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class PendingPolicy:
    """What to do about blocks that somebody is just writing to a tier."""

    wait_s: float = 0.05
    """They are asked for again as long as this; then they count as missing. Small computes what is about to arrive,
    large delays requests for it."""
    ask_every_s: float = 0.005


class Admission(enum.Enum):
    """Answer to the wish of a waiting request to start."""

    RUNNING = enum.auto()
    LOADING = enum.auto()
    LATER = enum.auto()
    """The request's lookup is under way, or another request is loading the same blocks. Others may start meanwhile."""
    NO_ROOM = enum.auto()
    """Too few blocks are free: the next try is worth while when some are freed."""


@dataclass(frozen=True, slots=True)
class _Load:
    request: Request
    first_block: int
    blocks: list[Block]
    findable: bool = True
    """Whether what arrives gets its keys."""


class PrefixCache:
    """The engine's side of block pool and hierarchy. Scheduler thread only; nothing blocks."""

    def __init__(  # noqa: PLR0913 - the parts that it is put together from
        self,
        block_pool: BlockPool,
        tokens_per_block: int,
        *,
        hierarchy: Hierarchy | None = None,
        cleaner: Cleaner | None = None,
        layerwise_loads: bool = False,
        pending: PendingPolicy | None = None,
        tokens: PrefixTokens | None = None,
        clock: Clock = MONOTONIC,
    ) -> None:
        """
        :param hierarchy: the tiers below; None keeps blocks on the device only. Stays the caller's.
        :param cleaner: of the same block pool and hierarchy; None copies blocks only when they become full.
        :param layerwise_loads: whether a request may run while its prefix is still being copied, layer after layer: the
            model's KV then waits on the device for each layer.
        :param tokens: counts what requests ask the hierarchy for; None: nobody looks.
        """
        self.tokens_per_block = tokens_per_block
        self._block_pool, self._hierarchy, self._cleaner = block_pool, hierarchy, cleaner
        self._layerwise_loads = layerwise_loads
        self._pending, self._clock = pending or PendingPolicy(), clock
        self._tokens = tokens
        self._loads: dict[int, _Load] = {}
        """The loads under way, by job."""
        self._loading: set[BlockKey] = set()
        """The blocks of `_loads` that will be findable."""
        self._saves: dict[int, list[int]] = {}
        """Blocks referenced for the sake of a copy, by job."""
        self._unsaved: dict[str, list[Block]] = {}
        """Became full in this step, by the trace that they belong to."""

    @property
    def copies_hold_blocks(self) -> bool:
        """Whether blocks will become free without anybody giving up anything."""
        return bool(self._saves) or (self._cleaner is not None and self._cleaner.num_held > 0)

    def admit(self, request: Request, *, is_alone: bool = False) -> Admission:
        """Gives a waiting request all the blocks that its tokens need, with as many hits as there are.

        Starts and polls its lookup on the way: call it in every step until it is RUNNING or LOADING.
        At least the last token is left to compute, since the next one follows from its logits.

        :param is_alone: no other request computes or loads: only then may it run before its prefix has arrived, since
            all requests of a step wait for the slowest.
        """
        if request.refused_at == self._block_pool.num_free:
            return Admission.NO_ROOM
        max_hits = self._max_hits(request)
        hits = self._block_pool.match_prefix(request.keys[:max_hits])
        if len(hits) < max_hits and request.keys[len(hits)] in self._loading:
            return Admission.LATER
        num_fetched = self._num_to_fetch(request, len(hits), max_hits)
        if num_fetched is None:
            return Admission.LATER
        self._block_pool.acquire(hits)
        fresh = self._allocate(self._num_blocks(request) - len(hits))
        if fresh is None:
            self._block_pool.free(hits)
            request.refused_at = self._block_pool.num_free
            return Admission.NO_ROOM
        request.refused_at = None
        request.block_ids = hits + fresh
        self._count_asked(request, len(hits), max_hits, num_fetched)
        self._count_hits(request, len(hits))
        if hits and self._hierarchy is not None:
            used = list(zip(request.keys, hits, strict=False))
            self._hold(self._hierarchy.note_hits(used), used)
        if not num_fetched or self._hierarchy is None:
            request.counted = True
            return Admission.RUNNING
        stop = len(hits) + num_fetched
        blocks = list(zip(request.keys[len(hits) : stop], fresh[:num_fetched], strict=True))
        if request.spans is not None:
            request.spans.enter("fetch", blocks=len(blocks))
        with _within_stage(request):
            request.job_id = self._hierarchy.start_load(blocks, by_layer=self._layerwise_loads and is_alone)
        self._loads[request.job_id] = _Load(request, len(hits), blocks)
        self._loading.update(key for key, _ in blocks)
        return Admission.LOADING

    def grow(self, request: Request) -> bool:
        """Makes sure that all tokens of a running request have a block. False when there is no free one."""
        missing = self._num_blocks(request) - len(request.block_ids)
        fresh = self._allocate(missing) if missing > 0 else []
        if fresh is None:
            return False
        request.block_ids += fresh
        return True

    def publish(self, request: Request) -> None:
        """Blocks that became full get their keys, and are saved by `end_step`."""
        num_full = request.num_computed // self.tokens_per_block
        request.hash_blocks(num_full, self.tokens_per_block)
        full = range(request.num_published, min(num_full, len(request.keys)))
        if full:
            trace = NO_CONTEXT if request.spans is None else request.spans.context
            unsaved = self._unsaved.setdefault(trace, [])
            for index in full:
                block = (request.keys[index], request.block_ids[index])
                self._block_pool.assign_key(block[1], block[0])
                unsaved.append(block)
        request.num_published = num_full

    def note_computed(self, num_tokens: Sequence[int], seconds: float) -> None:
        """What steps took that computed so many tokens in each chunk; of interest if they are prompts, above all."""
        num_prompt_tokens = sum(count for count in num_tokens if count >= self.tokens_per_block)
        if self._hierarchy is not None and 2 * num_prompt_tokens > sum(num_tokens):
            self._hierarchy.note_computed(num_prompt_tokens / self.tokens_per_block, seconds)

    def end_step(self) -> None:
        """Sends what was published down, and keeps the cold end of the free queue copied.

        What was published goes in one batch, and what is of traced requests in one for each of them.
        The blocks are referenced until they are copied, so that nobody writes to them meanwhile.
        """
        if self._hierarchy is None:
            self._unsaved.clear()
            return
        for trace, blocks in self._unsaved.items():
            with tracing.within(trace):
                self._hold(self._hierarchy.save_full(blocks), blocks)
        self._unsaved.clear()
        if self._cleaner is not None:
            self._cleaner.step()

    def poll(self) -> list[Request]:
        """Takes in what the hierarchy has finished; returns the requests whose loads are over."""
        if self._hierarchy is None:
            return []
        loaded = []
        for result in self._hierarchy.poll():
            if self._cleaner is not None and self._cleaner.take(result):
                continue
            if result.kind == "save":
                self._block_pool.free(self._saves.pop(result.job_id))
            else:
                loaded.append(self._end_load(result))
        return loaded

    def release(self, request: Request) -> None:
        """Gives back the blocks of a request that is not loading; published ones stay findable."""
        self.cancel_lookup(request)
        self._block_pool.free(request.block_ids)
        request.block_ids = []
        request.num_computed = request.num_published = 0

    def cancel_lookup(self, request: Request) -> None:
        """Forgets what was asked and answered."""
        if self._hierarchy is not None and request.lookup is not None and request.lookup.ticket is not None:
            self._hierarchy.cancel_lookup(request.lookup.ticket)
        request.lookup = None

    def cancel_load(self, request: Request) -> None:
        """Asks for the end of a load. `poll` returns the request as soon as its blocks are left alone."""
        if self._hierarchy is not None and request.job_id is not None:
            self._hierarchy.cancel(request.job_id)

    def reset(self, begun: Iterable[Request]) -> int:
        """Forgets every block, here and in the engine's own tiers; returns how many were findable here.

        :param begun: all requests that have blocks. They keep them, but nothing that they compute from now on is
            published: it follows from what is to be forgotten.
        """
        for request in begun:
            request.hasher = None
            request.keys.clear()
        self._loads = {job_id: replace(load, findable=False) for job_id, load in self._loads.items()}
        self._loading.clear()
        if self._hierarchy is not None:
            self._hierarchy.reset()
        return self._block_pool.reset()

    def _hold(self, save_id: int | None, blocks: list[Block]) -> None:
        """Keeps the blocks of a save as they are until it has read them."""
        if save_id is not None:
            self._saves[save_id] = [block_id for _, block_id in blocks]
            self._block_pool.acquire(self._saves[save_id])

    def _max_hits(self, request: Request) -> int:
        return min(len(request.keys), (len(request.tokens) - 1) // self.tokens_per_block)

    def _num_blocks(self, request: Request) -> int:
        return -(-len(request.tokens) // self.tokens_per_block)

    def _allocate(self, num_blocks: int) -> list[int] | None:
        blocks = self._block_pool.allocate(num_blocks)
        if blocks is None and self._cleaner is not None and self.copies_hold_blocks:
            self._cleaner.note_waited()
        return blocks

    def _num_to_fetch(self, request: Request, num_hits: int, max_hits: int) -> int | None:
        """Blocks worth fetching after the first `num_hits`; None while that is not known."""
        if self._hierarchy is None or num_hits >= max_hits:
            return 0
        lookup = request.lookup
        # Eviction may have taken device hits that were not asked for.
        if lookup is None or num_hits < lookup.first_block:
            self.cancel_lookup(request)
            previous = request.previous_keys(range(num_hits, max_hits), self.tokens_per_block)
            if request.spans is not None:
                request.spans.enter("lookup", blocks=max_hits - num_hits)
            with _within_stage(request):
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

    def _worth_asking_again(self, request: Request, statuses: list[Status]) -> bool:
        """Whether the leading hits end in a block that is being written, and not for too long."""
        first_other = next((status for status in statuses if status is not Status.HIT), None)
        if first_other is not Status.PENDING:
            return False
        now = self._clock()
        if request.pending_since is None:
            request.pending_since = now
        return now - request.pending_since < self._pending.wait_s

    def _end_load(self, result: JobResult) -> Request:
        """Blocks before the first failed one are hits; the rest is computed, what arrived of it too."""
        load = self._loads.pop(result.job_id)
        request = load.request
        num_good = min(result.failed, default=len(load.blocks))
        if load.findable:
            for key, block_id in load.blocks[:num_good]:
                self._block_pool.assign_key(block_id, key)
            self._loading.difference_update(key for key, _ in load.blocks)
        request.job_id = None
        request.num_published = load.first_block + num_good
        request.num_computed = request.num_published * self.tokens_per_block
        if not request.counted:
            if self._tokens is not None:
                self._tokens.note_load(result.tiers, num_good, self.tokens_per_block)
            for tier in result.tiers[:num_good]:
                request.cached_by_tier[tier] = request.cached_by_tier.get(tier, 0) + self.tokens_per_block
            request.counted = True
        return request

    def _count_asked(self, request: Request, num_hits: int, max_hits: int, num_fetched: int) -> None:
        """Counts what the tiers below were asked for, once for each request."""
        if self._tokens is None or request.lookup is None or request.counted:
            return
        asked = request.lookup.statuses[num_hits - request.lookup.first_block :]
        found = [block.tier for block in takewhile(lambda block: block.status is Status.HIT, asked)]
        self._tokens.note_lookup(max_hits - num_hits, found, num_fetched, self.tokens_per_block)

    def _count_hits(self, request: Request, num_hits: int) -> None:
        request.num_published = num_hits
        request.num_computed = num_hits * self.tokens_per_block
        if num_hits and not request.counted:
            request.cached_by_tier[DEVICE] = request.num_computed


def _within_stage(request: Request) -> contextlib.AbstractContextManager[None]:
    return _NOTHING if request.spans is None else request.spans.within_stage()


def _hits_by_tier(statuses: Sequence[BlockStatus]) -> dict[str, int]:
    tiers = Counter(block.tier for block in statuses if block.status is Status.HIT)
    return {f"hits.{tier}": count for tier, count in tiers.items()}
