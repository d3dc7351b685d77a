"""Blocks for requests: from the device, from the tiers below, or fresh; and full blocks back down.

One start of a request: lookup (polled) -> device hits and fetched blocks and fresh ones, all at once ->
load (polled) -> running. After each step, full blocks get their keys and go down in one batch.
"""

import enum
from collections.abc import Iterable, Sequence

from kvtier.device.block_pool import BlockPool
from kvtier.identity.keys import BlockKey
from kvtier.offload import Cleaner, Hierarchy
from kvtier_engine.events.kv_events import DEVICE, KVEvents
from kvtier_engine.scheduling.copy_on_write import CopyOnWrite, CopyTokens
from kvtier_engine.scheduling.fetch_planning import FetchPlanning
from kvtier_engine.scheduling.loads import Loads
from kvtier_engine.scheduling.partial_reuse import PartialHit, PartialReuse, Unknown
from kvtier_engine.scheduling.request import Request
from kvtier_engine.scheduling.saves import Saves
from kvtier_engine.scheduling.single_flight import SingleFlight


class Admission(enum.Enum):
    """Answer to the wish of a waiting request to start."""

    RUNNING = enum.auto()
    LOADING = enum.auto()
    LATER = enum.auto()
    """The request's lookup is under way, or another request is loading or computing the same blocks. Others may start
    meanwhile."""
    NO_ROOM = enum.auto()
    """Too few blocks are free: the next try is worth while when some are freed."""


class PrefixCache:
    """The engine's side of block pool and hierarchy. Scheduler thread only; nothing blocks."""

    def __init__(  # noqa: PLR0913 - the parts that it is put together from
        self,
        block_pool: BlockPool,
        tokens_per_block: int,
        copy_tokens: CopyTokens,
        *,
        hierarchy: Hierarchy | None = None,
        cleaner: Cleaner | None = None,
        layerwise_loads: bool = False,
        planning: FetchPlanning | None = None,
        partial_reuse: PartialReuse | None = None,
        single_flight: bool = False,
        events: KVEvents | None = None,
    ) -> None:
        """
        :param hierarchy: the tiers below; None keeps blocks on the device only. Stays the caller's.
        :param cleaner: of the same block pool and hierarchy; None copies blocks only when they become full.
        :param layerwise_loads: whether a request may run while its prefix is still being copied, layer after layer: the
            model's KV then waits on the device for each layer.
        :param planning: of the same hierarchy; None plans with defaults.
        :param partial_reuse: of the same block pool and hierarchy; None reuses whole blocks only.
        :param single_flight: whether requests wait for blocks that another one is computing.
        :param events: of the same block pool and hierarchy; None tells nobody what is where.
        """
        self.tokens_per_block = tokens_per_block
        self._block_pool, self._hierarchy, self._cleaner = block_pool, hierarchy, cleaner
        self._layerwise_loads = layerwise_loads
        self._planning = planning or (FetchPlanning(hierarchy, tokens_per_block) if hierarchy is not None else None)
        self._partial_reuse, self._copy_tokens = partial_reuse, copy_tokens
        self._copy_on_write = CopyOnWrite(block_pool, tokens_per_block, copy_tokens)
        self._events = events
        self._computing = SingleFlight() if single_flight else None
        self._loads: Loads | None = None
        self._saves: Saves | None = None
        if hierarchy is not None and self._planning is not None:
            self._loads = Loads(block_pool, hierarchy, self._planning, tokens_per_block, self._note_full)
            self._saves = Saves(block_pool, hierarchy)

    @property
    def copies_hold_blocks(self) -> bool:
        """Whether blocks will become free without anybody giving up anything."""
        is_saving = self._saves is not None and bool(self._saves.held)
        return is_saving or (self._cleaner is not None and self._cleaner.num_held > 0)

    @property
    def num_free(self) -> int:
        """Device blocks that nobody references."""
        return self._block_pool.num_free

    def num_cached_tokens(self, request: Request) -> int:
        """Leading tokens of a waiting request whose KV is on the device, or else in host memory. What is in the tiers
        below, which has to be asked for, is not counted."""
        keys = request.keys[: self._max_hits(request)]
        num_blocks = len(self._block_pool.match_prefix(keys))
        if self._hierarchy is not None:
            while num_blocks < len(keys) and self._hierarchy.holds(keys[num_blocks]):
                num_blocks += 1
        return num_blocks * self.tokens_per_block

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
        if len(hits) < max_hits and self._is_on_its_way(request.keys[len(hits)]):
            return Admission.LATER
        num_fetched = self._num_to_fetch(request, len(hits), max_hits)
        if num_fetched is None:
            return Admission.LATER
        partial = self._partial_hit(request, len(hits) + num_fetched)
        if isinstance(partial, Unknown):
            return Admission.LATER
        source = [partial.block_id] if partial is not None and partial.block_id is not None else []
        self._block_pool.acquire(hits + source)
        fresh = self._allocate(self._num_blocks(request) - len(hits))
        if fresh is None:
            self._block_pool.free(hits + source)
            request.refused_at = self._block_pool.num_free
            return Admission.NO_ROOM
        request.refused_at = None
        request.block_ids = hits + fresh
        if self._planning is not None:
            self._planning.count_asked(request, range(len(hits), max_hits), num_fetched)
        if self._partial_reuse is not None:
            self._partial_reuse.note_used(request.keys[: len(hits)])
        if partial is not None and source:
            self._copy_tokens(source[0], fresh[num_fetched], partial.num_tokens)
            self._block_pool.free(source)
        if self._computing is not None:
            self._computing.begin(request, request.keys[len(hits) + num_fetched :])
        return self._start(request, hits, fresh, num_fetched, partial, is_alone=is_alone)

    def _start(
        self,
        request: Request,
        hits: list[int],
        fresh: list[int],
        num_fetched: int,
        partial: PartialHit | None,
        *,
        is_alone: bool,
    ) -> Admission:
        """Counts what is on the device, and starts the load of what is below."""
        is_loaded = num_fetched > 0 or (partial is not None and partial.is_below)
        request.num_published = len(hits)
        request.num_computed = len(hits) * self.tokens_per_block
        if hits:
            request.count_cached(DEVICE, request.num_computed)
        if partial is not None and not is_loaded:
            request.num_computed += partial.num_tokens
            request.count_cached(DEVICE, partial.num_tokens)
        if hits and self._saves is not None:
            self._saves.note_hits(list(zip(request.keys, hits, strict=False)))
        if not is_loaded or self._loads is None:
            request.counted = True
            return Admission.RUNNING
        positions = range(len(hits), len(hits) + num_fetched)
        self._loads.start(request, positions, fresh, partial, by_layer=self._layerwise_loads and is_alone)
        return Admission.LOADING

    def fork(self, parent: Request, branch: Request) -> None:
        """Gives `branch` all blocks of `parent`, in the step that computed its last token and before `publish`."""
        self._copy_on_write.share(parent, branch)

    def grow(self, request: Request) -> bool:
        """Makes sure that all tokens of a running request have a block, and those to compute next one that no other
        request has. False when there is no free one."""
        if not self._copy_on_write.part(request):
            self._note_refused()
            return False
        missing = self._num_blocks(request) - len(request.block_ids)
        fresh = self._allocate(missing) if missing > 0 else []
        if fresh is None:
            return False
        request.block_ids += fresh
        return True

    def num_writable(self, request: Request) -> int:
        """The number of tokens for which a running request has blocks that it may write to: 0 while another one has the
        first of them, since `grow` found no room for a copy."""
        if not self._copy_on_write.may_write(request):
            return 0
        return len(request.block_ids) * self.tokens_per_block - request.num_computed

    def publish(self, request: Request) -> None:
        """Blocks that became full get their keys, and are saved by `end_step`."""
        num_full = request.num_computed // self.tokens_per_block
        request.hash_blocks(num_full, self.tokens_per_block)
        became_full = range(request.num_published, min(num_full, len(request.keys)))
        if became_full:
            blocks = [(request.keys[index], request.block_ids[index]) for index in became_full]
            for key, block_id in blocks:
                self._block_pool.assign_key(block_id, key)
            if self._saves is not None:
                self._saves.note_full(request, blocks)
            self._note_full(request, became_full)
        request.num_published = num_full

    def note_computed(self, num_tokens: Sequence[int], seconds: float) -> None:
        """What steps took that computed so many tokens in each chunk; of interest if they are prompts, above all."""
        num_prompt_tokens = sum(count for count in num_tokens if count >= self.tokens_per_block)
        if self._hierarchy is not None and 2 * num_prompt_tokens > sum(num_tokens):
            self._hierarchy.note_computed(num_prompt_tokens / self.tokens_per_block, seconds)

    def end_step(self) -> None:
        """Sends what was published down, keeps the cold end of the free queue copied, and tells what is where now."""
        if self._saves is not None:
            self._saves.start()
        if self._cleaner is not None:
            self._cleaner.step()
        if self._events is not None:
            self._events.publish()

    def poll(self) -> list[Request]:
        """Takes in what the hierarchy has finished; returns the requests whose loads are over."""
        if self._hierarchy is None or self._loads is None or self._saves is None:
            return []
        loaded = []
        for result in self._hierarchy.poll():
            if self._cleaner is not None and self._cleaner.take(result):
                continue
            if result.kind == "save":
                self._saves.end(result.job_id)
            else:
                loaded.append(self._loads.end(result))
        return loaded

    def release(self, request: Request) -> None:
        """Gives back the blocks of a request that is not loading; published ones stay findable."""
        self.cancel_lookup(request)
        self._block_pool.free(request.block_ids)
        request.block_ids = []
        request.num_computed = request.num_published = 0
        if self._computing is not None:
            self._computing.end(request)

    def cancel_lookup(self, request: Request) -> None:
        """Forgets what was asked and answered."""
        if self._planning is not None:
            self._planning.cancel(request)
        if self._partial_reuse is not None:
            self._partial_reuse.cancel(request)

    def cancel_load(self, request: Request) -> None:
        """Asks for the end of a load. `poll` returns the request as soon as its blocks are left alone."""
        if self._loads is not None:
            self._loads.cancel(request)

    def reset(self, begun: Iterable[Request]) -> int:
        """Forgets every block, here and in the engine's own tiers; returns how many were findable here.

        :param begun: all requests that have blocks. They keep them, but nothing that they compute from now on is
            published: it follows from what is to be forgotten.
        """
        for request in begun:
            request.hasher = None
            request.keys.clear()
        if self._loads is not None:
            self._loads.forget()
        if self._computing is not None:
            self._computing.clear()
        if self._partial_reuse is not None:
            self._partial_reuse.reset()
        if self._hierarchy is not None:
            self._hierarchy.reset()
        if self._events is not None:
            self._events.note_reset()
        return self._block_pool.reset()

    def _max_hits(self, request: Request) -> int:
        return min(len(request.keys), (len(request.tokens) - 1) // self.tokens_per_block)

    def _num_blocks(self, request: Request) -> int:
        return -(-len(request.tokens) // self.tokens_per_block)

    def _allocate(self, num_blocks: int) -> list[int] | None:
        blocks = self._block_pool.allocate(num_blocks)
        if blocks is None:
            self._note_refused()
        return blocks

    def _note_refused(self) -> None:
        if self._cleaner is not None and self.copies_hold_blocks:
            self._cleaner.note_waited()

    def _is_on_its_way(self, key: BlockKey) -> bool:
        return any(blocks is not None and key in blocks for blocks in (self._loads, self._computing))

    def _num_to_fetch(self, request: Request, num_hits: int, max_hits: int) -> int | None:
        if self._planning is None:
            return 0
        return self._planning.num_to_fetch(request, num_hits, max_hits)

    def _partial_hit(self, request: Request, position: int) -> PartialHit | Unknown | None:
        return self._partial_reuse.find(request, position) if self._partial_reuse is not None else None

    def _note_full(self, request: Request, blocks: range) -> None:
        if self._computing is not None:
            self._computing.done(request.keys[blocks.start : blocks.stop])
        if self._partial_reuse is not None:
            self._partial_reuse.note_full(request, blocks)
        if self._events is not None:
            self._events.note_full(request.keys, request.tokens, blocks)
