"""A simulated engine: admission, fetches, chunked prefill beside decodes, and what its tiers hold."""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from kvtier_gateway.fleet.events import Events
from kvtier_gateway.fleet.hardware import EngineModel
from kvtier_gateway.fleet.kv_store import DeviceStore, LruStore
from kvtier_gateway.fleet.pool import SimPool
from kvtier_gateway.fleet.request import SimRequest
from kvtier_gateway.routing.values import BlocksRemoved, BlocksStored, EngineId, Key, KvEvent, Medium, Prices

_FETCH_AGAIN_BLOCKS = 4
_NEWEST = 0.2
"""Weight of the last fetch in the measured bandwidth."""


class EngineOwner(Protocol):
    """Whom engines tell what happens."""

    def first_token(self, engine: "SimEngine", request: SimRequest) -> None:
        """The request has its first token."""

    def finished(self, engine: "SimEngine", request: SimRequest) -> None:
        """The answer is complete."""

    def told(self, engine: "SimEngine", events: Sequence[KvEvent]) -> None:
        """KV events have come, after their delay."""


class SimEngine:
    """Requests are admitted in order while there is memory for them; then fetched; then computed one after the other.

    Between two events the engine is in one phase: it computes a prompt in chunks, with a step of every decode beside
    each chunk; or it only decodes; or it idles. Decodes count steps: an answer ends when so many steps have passed.
    Answers that end while a prompt is computed are noticed when that is over.
    """

    def __init__(
        self,
        engine_id: EngineId,
        model: EngineModel,
        pool: SimPool,
        tokens_per_block: int,
        events: Events,
        owner: EngineOwner,
    ) -> None:
        self.id, self.model, self._pool, self._events, self._owner = engine_id, model, pool, events, owner
        self._tokens_per_block = tokens_per_block
        self.block_bytes = tokens_per_block * model.compute.kv_bytes_per_token
        self.device = DeviceStore(model.device_bytes // self.block_bytes)
        self.host = LruStore(model.host_bytes // self.block_bytes)
        self._device_blocks = model.device_bytes // self.block_bytes
        self._waiting: deque[SimRequest] = deque()
        self._fetches: deque[tuple[SimRequest, int, int]] = deque()
        self._ready: deque[SimRequest] = deque()
        self._computing: SimRequest | None = None
        self._computing_ends_s = 0.0
        self._decodes: list[tuple[float, int, SimRequest]] = []
        self._decoded_tokens = 0
        self._steps = 0.0
        """Steps of decodes so far."""
        self._phase_began_s = 0.0
        self._step_s = 0.0
        """How long a decode takes in a phase of decodes alone; 0 in other phases."""
        self._phase = 0
        """Counts phases, so that ends of former ones are told apart."""
        self._untold: list[KvEvent] = []
        self.pool_bandwidth = pool.bandwidth() if pool.is_there else 0.0
        self.backlog_tokens = 0
        self.fetched_bytes = 0
        self.computed_tokens = 0
        self.prices = self.measured_prices()

    def measured_prices(self) -> Prices:
        """What its metrics tell now."""
        return replace(self.model.compute, pool_bytes_per_s=self.pool_bandwidth)

    def arrive(self, request: SimRequest) -> None:
        """The gateway sends a request."""
        self._waiting.append(request)
        self.backlog_tokens += request.prompt_tokens
        self._admit()

    def true_prices(self) -> Prices:
        """What a prompt costs that is computed and fetched now: with the steps that its chunks share with decodes."""
        per_token_s = (self.model.step_s + self._decoded_kv_s()) / self.model.chunk_tokens
        token_s, bandwidth = (
            self.model.compute.token_s + per_token_s,
            self._pool.bandwidth() if self._pool.is_there else 0.0,
        )
        return replace(self.model.compute, token_s=token_s, request_s=0.0, pool_bytes_per_s=bandwidth)

    def backlog_s(self) -> float:
        """Seconds of computing before a request that arrives now is computed."""
        prices, tokens = self.true_prices(), self._tokens_per_block
        ahead = [*self._ready, *(request for request, _, _ in self._fetches), *self._waiting]
        seconds = sum(prices.compute_s(request.cached * tokens, request.prompt_tokens) for request in ahead)
        return seconds + (self._computing_ends_s - self._events.now_s if self._computing is not None else 0.0)

    def local_run(self, keys: Sequence[Key], start: int) -> int:
        """The end of the leading run from `start` on that is on the device or in host memory."""
        return self.host.run(keys, start)

    def _admit(self) -> None:
        while self._waiting and self.device.fits(self._places(self._waiting[0])):
            request = self._waiting.popleft()
            on_device = self.device.run(request.keys)
            self.backlog_tokens -= on_device * self._tokens_per_block
            request.num_held = request.cached = on_device
            request.num_private = max(0, self._places(request) - on_device)
            self._tell(BlocksRemoved, Medium.DEVICE, self.device.hold(request.keys[:on_device], request.num_private))
            worth = self._worth_fetching(request)
            if any(worth):
                self._fetch(request, *worth)
            else:
                self._queue(request)

    def _places(self, request: SimRequest) -> int:
        return min(self._device_blocks, -(-(request.prompt_tokens + request.answer_tokens) // self._tokens_per_block))

    def _worth_fetching(self, request: SimRequest) -> tuple[int, int]:
        """The blocks that are cheaper to fetch than to compute: from host memory, and after those from the pool."""
        compute, start, end_token = self.model.compute, request.cached, request.prompt_tokens
        local = self.host.run(request.keys, start)
        end = self._pool.run(request.keys, local)
        host_s = (local - start) * self.block_bytes / compute.host_bytes_per_s
        best, best_s = (0, 0), compute.compute_s(start * self._tokens_per_block, end_token)
        if local > start:
            seconds = host_s + compute.compute_s(local * self._tokens_per_block, end_token)
            if seconds < best_s:
                best, best_s = (local - start, 0), seconds
        if end > local:
            pool_s = (end - local) * self.block_bytes / self._pool.bandwidth() + self._pool.model.lookup_s
            if host_s + pool_s + compute.compute_s(end * self._tokens_per_block, end_token) < best_s:
                best = (local - start, end - local)
        return best

    def _fetch(self, request: SimRequest, from_host: int, from_pool: int) -> None:
        self.backlog_tokens -= (from_host + from_pool) * self._tokens_per_block
        request.cached += from_host + from_pool
        self._fetches.append((request, from_host, from_pool))
        if len(self._fetches) == 1:
            self._begin_fetch()

    def _begin_fetch(self) -> None:
        _, from_host, from_pool = self._fetches[0]
        seconds = from_host * self.block_bytes / self.model.compute.host_bytes_per_s
        if from_pool:
            bandwidth = self._pool.begin_fetch()
            self.pool_bandwidth += _NEWEST * (bandwidth - self.pool_bandwidth)
            seconds += from_pool * self.block_bytes / bandwidth
            self.fetched_bytes += from_pool * self.block_bytes
        self._events.after(seconds, self._end_fetch)

    def _end_fetch(self) -> None:
        request, _, from_pool = self._fetches.popleft()
        if from_pool:
            self._pool.end_fetch()
        if self._fetches:
            self._begin_fetch()
        self._queue(request)

    def _queue(self, request: SimRequest) -> None:
        self._ready.append(request)
        if self._computing is None:
            self._end_phase()
            self._begin_phase()

    def _begin_phase(self) -> None:
        if self._computing is not None:
            return
        self._phase += 1
        self._phase_began_s, self._step_s = self._events.now_s, 0.0
        while self._ready:
            request = self._ready.popleft()
            on_device = self.device.run(request.keys)
            if on_device > request.cached:
                self.backlog_tokens -= (on_device - request.cached) * self._tokens_per_block
                request.cached = on_device
            worth = (0, 0) if request.fetched_again else self._worth_fetching(request)
            if sum(worth) >= _FETCH_AGAIN_BLOCKS:  # computed by others meanwhile
                request.fetched_again = True
                self._fetch(request, *worth)
                continue
            self._compute(request)
            return
        if self._decodes:
            self._step_s = self.model.step_s + self._decoded_kv_s()
            left = max(0.0, self._decodes[0][0] - self._steps)
            self._events.after(left * self._step_s, self._decoded, self._phase)

    def _compute(self, request: SimRequest) -> None:
        first = request.cached * self._tokens_per_block
        tokens = request.prompt_tokens - first
        seconds = self.model.compute.compute_s(first, request.prompt_tokens)
        steps = max(1.0, tokens / self.model.chunk_tokens)
        seconds += tokens / self.model.chunk_tokens * (self.model.step_s + self._decoded_kv_s())
        self.computed_tokens += tokens
        self._computing, self._computing_ends_s = request, self._events.now_s + seconds
        self._events.after(seconds, self._computed, steps)

    def _decoded_kv_s(self) -> float:
        return self._decoded_tokens * self.model.compute.kv_bytes_per_token * self.model.kv_byte_s

    def _end_phase(self) -> None:
        if self._step_s:
            self._steps += (self._events.now_s - self._phase_began_s) / self._step_s
            self._step_s = 0.0
        while self._decodes and self._decodes[0][0] <= self._steps + 1e-6:
            self._finish(heapq.heappop(self._decodes)[2])

    def _decoded(self, phase: int) -> None:
        if phase == self._phase:
            self._end_phase()
            self._begin_phase()

    def _computed(self, steps: float) -> None:
        request = self._computing
        assert request is not None
        self._computing = None
        self._steps += steps
        self.backlog_tokens -= request.prompt_tokens - request.cached * self._tokens_per_block
        self._keep(request)
        request.first_token_s = self._events.now_s
        self._owner.first_token(self, request)
        self._decoded_tokens += request.prompt_tokens
        heapq.heappush(self._decodes, (self._steps + max(0, request.answer_tokens - 1), request.number, request))
        self._end_phase()
        self._begin_phase()

    def _keep(self, request: SimRequest) -> None:
        """What was fetched and computed is found from now on, here and, later, in the pool."""
        keys = request.keys
        new, evicted = self.device.fill(keys[request.num_held : request.num_held + request.num_private])
        self._tell(BlocksStored, Medium.DEVICE, new)
        self._tell(BlocksRemoved, Medium.DEVICE, evicted)
        added, dropped = self.host.put(keys)
        self._tell(BlocksStored, Medium.HOST, added)
        self._tell(BlocksRemoved, Medium.HOST, dropped)
        if self._pool.is_there:
            self._events.after(self._pool.model.written_after_s, self._pool.put, keys)

    def _finish(self, request: SimRequest) -> None:
        self._decoded_tokens -= request.prompt_tokens
        found = min(len(request.keys), request.num_held + request.num_private)
        self.device.release(request.keys[:found], request.num_private - (found - request.num_held))
        self._owner.finished(self, request)
        self._admit()

    def _tell(self, kind: type[BlocksStored] | type[BlocksRemoved], medium: Medium, keys: Sequence[Key]) -> None:
        if not keys:
            return
        if not self._untold:
            self._events.after(self.model.event_delay_s, self._tell_all)
        self._untold.append(kind(keys, medium))

    def _tell_all(self) -> None:
        told, self._untold = self._untold, []
        self._owner.told(self, told)
