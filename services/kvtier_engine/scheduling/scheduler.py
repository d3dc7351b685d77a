"""Continuous batching: which request computes how many tokens in each step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from kvtier.clock import MONOTONIC, Clock
from kvtier_engine.model.llama import Chunk, over_all_blocks
from kvtier_engine.model.paged_kv import PagedKV
from kvtier_engine.scheduling.answers import Answers
from kvtier_engine.scheduling.branching import Branching
from kvtier_engine.scheduling.completion import FinishReason
from kvtier_engine.scheduling.compute_times import ComputeTimes
from kvtier_engine.scheduling.metrics import EngineMetrics
from kvtier_engine.scheduling.prefix_cache import Admission, PrefixCache
from kvtier_engine.scheduling.request import Request, Stage
from kvtier_engine.scheduling.staged_requests import StagedRequests
from kvtier_engine.scheduling.waiting_order import LongestPrefixFirst

_WARM_UP_TOKENS = 64


class Model(Protocol):
    """What the scheduler needs of a model: `LlamaModel`."""

    def forward(self, chunks: Sequence[Chunk], kv: PagedKV) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Bounds of a step."""

    max_batch_tokens: int = 4096
    """Tokens per step. Small: prefill in many chunks. Large: decoding requests wait longer for a prefill."""
    max_running: int = 16
    """Requests that have blocks, or are next to get some. One with several branches counts as so many."""
    order: Literal["cache_aware", "fcfs"] = "cache_aware"
    """Which waiting request begins next: see `Scheduler`."""


class Scheduler:
    """Scheduler thread only. A step never waits for a tier.

    Waiting requests begin in order of arrival (`fcfs`), or those with the longest cached prefix first (`cache_aware`):
    that prefix may be evicted while its request waits, and a request that needs little computing lets the next one
    begin soon. The model is SGLang's policy `lpm`, under which a request may wait for ever. Here each cached token
    counts as much as waiting for the time that computing one takes: a request is passed only by requests that came
    later by no more than computing their cached prefix would take.

    Decoding requests come first in every step, then prefills in chunks, both in order of arrival. When blocks run out,
    the latest running one gives up its own and starts again later; what it had computed stays findable until it is
    overwritten.

    A request with several branches computes its prompt once. Its branches part at the first sampled token: each goes on
    as a request of its own, with references to the blocks so far.
    """

    def __init__(
        self,
        model: Model,
        kv: PagedKV,
        cache: PrefixCache,
        metrics: EngineMetrics,
        settings: SchedulerSettings | None = None,
        clock: Clock = MONOTONIC,
    ) -> None:
        """
        :param kv: on CPU, `forward` has computed when it returns; elsewhere, only when a token has been sampled.
        :param cache: over exactly the blocks of `kv`.
        """
        self._model, self._kv, self._cache, self._metrics = model, kv, cache, metrics
        self._settings, self._clock = settings or SchedulerSettings(), clock
        self._compute_times = ComputeTimes(asynchronous=kv.tensor.device.type != "cpu")
        self._waiting_order = LongestPrefixFirst(cache, clock) if self._settings.order == "cache_aware" else None
        self.requests = StagedRequests(cache, metrics)
        """All that have not ended, by stage."""
        self._answers = Answers(metrics, self._clock)
        self._branching = Branching(self.requests, cache, self._answers)

    @property
    def num_unfinished(self) -> int:
        """Requests that hold or want blocks."""
        return len(self.requests)

    @property
    def max_running(self) -> int:
        """How many sequences a step may have, at most."""
        return self._settings.max_running

    @property
    def num_free_blocks(self) -> int:
        """Device blocks that nobody references."""
        return self._cache.num_free

    def warm_up(self) -> None:
        """Computes into blocks that nobody has, before the first request: for a process's first pass over the
        weights takes twice as long as the next."""
        num_tokens = min(_WARM_UP_TOKENS, self._kv.num_blocks * self._kv.tokens_per_block)
        for count in (num_tokens, 1):
            self._model.forward([over_all_blocks(self._kv, [0] * count)], self._kv)

    def add(self, request: Request) -> None:
        """Queues a request. It must fit into the blocks alone, with its whole answer."""
        started = self._clock()
        request.hash_blocks(len(request.tokens) // self._cache.tokens_per_block, self._cache.tokens_per_block)
        self.requests.waiting.append(request)
        hashed_s = self._clock() - started
        self._metrics.cache_seconds.inc(hashed_s)
        self._metrics.step_seconds.inc(hashed_s)

    def cancel(self, request_id: int, reason: FinishReason = "cancelled", branch: int | None = None) -> None:
        """Ends a request early, or one branch of it; beams, which wait for each other, only together. Unknown ones have
        ended already."""
        for request in self.requests:
            is_meant = branch in (None, request.branch) or request.search is not None
            if request.request_id == request_id and is_meant:
                self._end(request, reason)

    def reset_cache(self) -> int:
        """Forgets all cached blocks (`PrefixCache.reset`); those that wait ask again. Returns the device's number."""
        for request in self.requests.waiting:
            self._cache.cancel_lookup(request)
        return self._cache.reset(self.requests.begun)

    def end_all(self) -> None:
        """Ends every request early."""
        for request in self.requests:
            self._end(request, "cancelled")

    def abandon_all(self, reason: FinishReason) -> None:
        """Tells all requesters that it is over, and leaves their blocks as they are: for an engine that ends."""
        for request in self.requests:
            self._answers.end(request, reason)

    def step(self) -> bool:
        """Computes one batch. False when there was nothing to compute: then tiers or new requests come first."""
        started = self._clock()
        self.requests.take_loaded()
        self._admit()
        plan = self._plan()
        self._metrics.running.set(len(self.requests.running))
        self._metrics.waiting.set(len(self.requests.waiting) + len(self.requests.loading))
        if not plan:
            self._compute_times.end_idle_step()
            self._cache.end_step()
            return self._park()
        planned, is_arriving = self._clock(), self._kv.is_arriving
        sampled = self._compute(plan)
        computed = self._clock()
        for request, _ in plan:
            self._cache.publish(request)
        self._cache.end_step()
        ended = self._clock()
        for request in sampled:
            self._end_if_over(request)
        self._metrics.cache_seconds.inc((planned - started) + (ended - computed))
        self._metrics.step_seconds.inc(ended - started)
        num_tokens = [count for _, count in plan]
        booked = self._compute_times.end_step(
            num_tokens, planned, computed, sampled=bool(sampled), is_arriving=is_arriving
        )
        if booked is not None:
            self._metrics.book(booked)
            if booked.is_pure:
                if self._waiting_order is not None:
                    self._waiting_order.note_computed(booked.num_tokens, booked.seconds)
                self._cache.note_computed(booked.num_tokens, booked.seconds)
        return True

    def _park(self) -> bool:
        """Takes the blocks of beams that only wait for others of their search, which may have no room without."""
        if not self.requests.waiting:
            return False
        idle = [request for request in self.requests.running if request.num_to_compute == 0]
        for request in idle:
            self.requests.preempt(request)
        return bool(idle)

    def _admit(self) -> None:
        """Starts waiting requests in order; one that has to wait for a tier is passed by others."""
        later: list[Request] = []
        num_places = self._settings.max_running - sum(r.num_places for r in self.requests.begun)
        if num_places > 0 and len(self.requests.waiting) > 1 and self._waiting_order is not None:
            self._waiting_order.sort(self.requests.waiting)
        while self.requests.waiting and self.requests.waiting[0].num_places <= num_places:
            request = self.requests.waiting.popleft()
            if request.search is not None and request.search.awaits_others(request.branch):
                later.append(request)
                continue
            num_places -= request.num_places
            is_alone = not (self.requests or later)
            admission = self._cache.admit(request, is_alone=is_alone)
            if admission is Admission.RUNNING:
                self.requests.run(request)
            elif admission is Admission.LOADING:
                self.requests.load(request)
            else:
                later.append(request)
                if admission is Admission.NO_ROOM:
                    break
        self.requests.waiting.extendleft(reversed(later))

    def _plan(self) -> list[tuple[Request, int]]:
        """(request, number of tokens) of the next batch."""
        for request in tuple(self.requests.running):
            if request.stage is Stage.RUNNING:
                self._make_room(request)
        budget = self._settings.max_batch_tokens
        plan: list[tuple[Request, int]] = []
        for request in sorted(self.requests.running, key=lambda r: r.num_to_compute > 1):
            num_tokens = min(request.num_to_compute, self._cache.num_writable(request), budget)
            if num_tokens > 0:
                plan.append((request, num_tokens))
                budget -= num_tokens
        return plan

    def _make_room(self, request: Request) -> None:
        """Blocks for all tokens of `request`, if need be those of later ones; else it sits out this step."""
        while not self._cache.grow(request):
            # Copies end within milliseconds by themselves; then giving up anything would be a waste.
            if self._cache.copies_hold_blocks or len(self.requests.running) == 1:
                return
            victim = self.requests.running[-1]
            self.requests.preempt(victim)
            if victim is request:
                return

    def _compute(self, plan: list[tuple[Request, int]]) -> list[Request]:
        """Returns the requests for which a token was sampled: then the host has waited until the device had computed
        the step."""
        chunks = [
            Chunk(
                request.tokens[request.num_computed :][:num_tokens],
                request.num_computed,
                request.block_ids,
                request.adapter,
                request.windowed,
            )
            for request, num_tokens in plan
        ]
        logits = self._model.forward(chunks, self._kv)
        sampled: list[Request] = []
        for row, (request, num_tokens) in enumerate(plan):
            request.num_computed += num_tokens
            if request.num_to_compute == 0:
                if request.search is not None:
                    request.search.offer(request.branch, logits[row])
                    sampled.append(request)
                    continue
                branches = [request, *self._branching.fork(request)]
                for branch in branches:
                    self._answers.sample(branch, logits[row])
                sampled += branches
        for request in sampled:
            if request.search is not None and request.search.is_ready:
                self._branching.advance(request)
        return sampled

    def _end_if_over(self, request: Request) -> None:
        num_answer = request.num_answer_tokens
        if request.failure is not None:
            self._end(request, "failed")
        elif num_answer and request.tokens[-1] in request.sampling.eos_token_ids:
            self._end(request, "stop")
        elif num_answer >= request.sampling.max_tokens:
            self._end(request, "length")

    def _end(self, request: Request, reason: FinishReason) -> None:
        """Tells the requester, and gives blocks back, those of a load as soon as it leaves them alone."""
        if request.stage is not Stage.ENDED:
            self.requests.withdraw(request)
            self._answers.end(request, reason)
