"""Blocks for requests: from the device, from the tiers below, or fresh; and full blocks back down.

One start of a request: lookup (polled) -> device hits and fetched blocks and fresh ones, all at once ->
load (polled) -> running. After each step, full blocks get their keys and go down in one batch.
"""

import enum
from collections.abc import Iterable, Sequence

from kvtier.device.block_pool import BlockPool
from kvtier.identity.keys import BlockKey
from kvtier.offload import Block, Cleaner, Hierarchy
from kvtier_engine.events.kv_events import DEVICE, KVEvents
from kvtier_engine.scheduling.copy_on_write import CopyTokens
from kvtier_engine.scheduling.fetch_planning import FetchPlanning
from kvtier_engine.scheduling.loads import Loads
from kvtier_engine.scheduling.partial_reuse import PartialHit, PartialReuse, Unknown
from kvtier_engine.scheduling.request import Request
from kvtier_engine.scheduling.request_blocks import RequestBlocks
from kvtier_engine.scheduling.saves import Saves
from kvtier_engine.scheduling.single_flight import SingleFlight
from kvtier_engine.scheduling.windowed_blocks import WindowedBlocks


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
        windowed: WindowedBlocks,
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
        :param windowed: works on the same block pool.
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
        self._windowed = windowed
        self._layerwise_loads = layerwise_loads
        self._planning = planning
        if planning is None and hierarchy is not None:
            self._planning = FetchPlanning(hierarchy, windowed, tokens_per_block)
        self._partial_reuse = partial_reuse
        self._blocks = RequestBlocks(block_pool, windowed, tokens_per_block, copy_tokens)
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
        while num_blocks < len(keys) and self._is_near(keys[num_blocks]):
            num_blocks += 1
        return self._windowed.num_usable(request, num_blocks, self._is_near) * self.tokens_per_block

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
        here = self._block_pool.match_prefix(request.keys[:max_hits])
        num_hits = self._windowed.num_usable(request, len(here), self._windowed.__contains__)
        if num_hits < max_hits and self._is_on_its_way(request.keys[num_hits]):
            return Admission.LATER
        num_fetched = self._num_to_fetch(request, num_hits, len(here), max_hits)
        if num_fetched is None:
            return Admission.LATER
        prefix = range(num_hits, num_hits + num_fetched)
        partial = self._partial_hit(request, prefix.stop)
        if isinstance(partial, Unknown):
            return Admission.LATER
        fetched = self._blocks.take(request, here[: prefix.stop], prefix.stop, partial)
        if fetched is None and partial is not None and not partial.is_below:
            # What is copied takes room beside the copy: a request that fits alone might never begin with it.
            partial = None
            fetched = self._blocks.take(request, here[: prefix.stop], prefix.stop, partial)
        if fetched is None:
            self._note_refused()
            request.refused_at = self._block_pool.num_free
            return Admission.NO_ROOM
        request.refused_at = None
        if self._planning is not None:
            self._planning.count_asked(request, max_hits - num_hits)
        if self._partial_reuse is not None:
            self._partial_reuse.note_used(request.keys[:num_hits])
        if self._computing is not None:
            self._computing.begin(request, request.keys[prefix.stop :])
        return self._start(request, prefix, fetched, partial, is_alone=is_alone)

    def _start(
        self,
        request: Request,
        prefix: range,
        fetched: list[tuple[int, Block]],
        partial: PartialHit | None,
        *,
        is_alone: bool,
    ) -> Admission:
        """Counts what is on the device, and starts the load of what is below."""
        num_hits = request.num_published = prefix.start
        is_loaded = bool(prefix) or (partial is not None and partial.is_below)
        request.num_computed = num_hits * self.tokens_per_block
        if num_hits:
            request.count_cached(DEVICE, request.num_computed)
        if partial is not None and not is_loaded:
            request.num_computed += partial.num_tokens
            request.count_cached(DEVICE, partial.num_tokens)
        if num_hits and self._saves is not None:
            self._saves.note_hits(self._blocks.at(request, range(num_hits)))
        if not is_loaded or self._loads is None:
            request.counted = True
            return Admission.RUNNING
        self._loads.start(request, prefix, fetched, partial, by_layer=self._layerwise_loads and is_alone)
        return Admission.LOADING

    def fork(self, parent: Request, branch: Request) -> None:
        """Gives `branch` all blocks of `parent`, in the step that computed its last token and before `publish`."""
        self._blocks.share(parent, branch)

    def grow(self, request: Request) -> bool:
        """Makes sure that all tokens of a running request have a block, in windowed layers those of a window ahead, and
        those to compute next one that no other request has. False when too few are free."""
        if self._blocks.grow(request):
            return True
        self._note_refused()
        return False

    def num_writable(self, request: Request) -> int:
        """The number of tokens for which a running request has blocks that it may write to: 0 while another one has the
        first of them, since `grow` found no room for a copy."""
        return self._blocks.num_writable(request)

    def publish(self, request: Request) -> None:
        """Blocks that became full get their keys, and are saved by `end_step`."""
        num_full = request.num_computed // self.tokens_per_block
        request.hash_blocks(num_full, self.tokens_per_block)
        became_full = range(request.num_published, min(num_full, len(request.keys)))
        if became_full:
            blocks = self._blocks.at(request, became_full)
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
        self._blocks.release(request)
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
            request.forget_keys()
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

    def _note_refused(self) -> None:
        if self._cleaner is not None and self.copies_hold_blocks:
            self._cleaner.note_waited()

    def _is_on_its_way(self, key: BlockKey) -> bool:
        return any(blocks is not None and key in blocks for blocks in (self._loads, self._computing))

    def _is_near(self, key: BlockKey) -> bool:
        """Whether the device or host memory has this block."""
        return key in self._block_pool or (self._hierarchy is not None and self._hierarchy.holds(key))

    def _num_to_fetch(self, request: Request, num_hits: int, num_here: int, max_hits: int) -> int | None:
        if self._planning is None or request.begins_anew:
            return 0
        return self._planning.num_to_fetch(request, num_hits, num_here, max_hits)

    def _partial_hit(self, request: Request, position: int) -> PartialHit | Unknown | None:
        if self._partial_reuse is None or request.begins_anew:
            return None
        return self._partial_reuse.find(request, position)

    def _note_full(self, request: Request, blocks: range) -> None:
        if self._computing is not None:
            self._computing.done(request.keys[blocks.start : blocks.stop])
        if self._partial_reuse is not None:
            self._partial_reuse.note_full(request, blocks)
        if self._events is not None:
            self._events.note_full(request.keys, request.tokens, blocks)
