"""The engine: one thread computes in `run`; every other thread submits and cancels."""

import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from kvtier.errors import ClosedError, InvalidInputError, KvtierError, LimitExceededError
from kvtier.identity.keys import BlockHasher
from kvtier.offload import Hierarchy
from kvtier_engine.model.paged_kv import PagedKV
from kvtier_engine.scheduling.completion import DoneCallback, FinishReason, TokenCallback
from kvtier_engine.scheduling.request import Request
from kvtier_engine.scheduling.request_spans import RequestSpans
from kvtier_engine.scheduling.sampling_params import Sampling
from kvtier_engine.scheduling.scheduler import Scheduler

_STUCK_WAIT_S = 0.005
"""Seconds between steps while requests wait for a tier that announces nothing: blocks being written, deadlines."""
_IDLE_WAIT_S = 0.5
"""Seconds between looks for blocks that could not be copied when they became full."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What a single request may be."""

    max_total_tokens: int
    """Prompt and answer: what the model's positions and the KV memory both allow."""
    vocab_size: int
    model_is_the_limit: bool = False
    """The model's positions are what allows no more; otherwise it is the KV memory."""

    @classmethod
    def of(cls, *, max_positions: int, kv: PagedKV, vocab_size: int) -> Self:
        """Returns the limits of a model with so many positions, and of a request that has all of `kv` for itself."""
        room = kv.groups.room(kv.num_blocks, kv.tokens_per_block)
        return cls(
            max_total_tokens=min(max_positions, room),
            vocab_size=vocab_size,
            model_is_the_limit=max_positions <= room,
        )


ResetCallback = Callable[[int | None], None]
"""Called once, in the engine's thread, with the number of blocks that the device forgot; None when the engine ended
before. Must not block."""


@dataclass(frozen=True, slots=True)
class _Ending:
    request_id: int
    reason: FinishReason
    branch: int | None


@dataclass(frozen=True, slots=True)
class _Reset:
    on_done: ResetCallback


class Engine:
    """Feeds a scheduler.

    `warm_up`, `run`, `run_until` and `close` are for one thread, which should be the process's first:
    OpenMP lets the threads of a parallel region wait actively only as long as there are no more of them than
    cores, and it always counts the first one. A warm request on 2 cores takes 75 ms there, 110 in any other thread.
    `submit`, `cancel`, `reset_cache`, `stop` and `healthy` are for any thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        limits: EngineLimits,
        *,
        hasher: BlockHasher | None,
        hashers: Mapping[str, BlockHasher | None] | None = None,
        adapters: Mapping[str, bytes] | None = None,
        hierarchy: Hierarchy | None = None,
    ) -> None:
        """
        :param scheduler: it and `hierarchy` are for the engine's thread alone.
        :param hasher: of the tenant whose cache requests use that name none; None computes their prompts from scratch,
            and nobody finds what they computed.
        :param hashers: those of the tenants that requests may name; None as above.
        :param adapters: the digests of the LoRA adapters that requests may name, by name.
        :param hierarchy: what the scheduler uses; stays the caller's, who closes it after the engine.
        """
        self.limits = limits
        self._scheduler, self._hierarchy = scheduler, hierarchy
        of_tenants: dict[str | None, BlockHasher | None] = {None: hasher}
        for tenant, each in (hashers or {}).items():
            of_tenants[tenant] = each
        self._hashers: dict[tuple[str | None, str | None], BlockHasher | None] = {
            (name, None): known for name, known in of_tenants.items()
        }
        for adapter, digest in (adapters or {}).items():
            for name, known in of_tenants.items():
                self._hashers[name, adapter] = None if known is None else known.with_adapter(digest)
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._inbox: list[Request | _Ending | _Reset] = []  # guarded by _lock; what to do next, in order
        self._stopping = False  # guarded by _lock
        self._failed = False  # guarded by _lock

    @property
    def healthy(self) -> bool:
        """False once a step has failed: a bug or broken memory. The engine then refuses requests."""
        with self._lock:
            return not self._failed

    def serves(self, tenant: str | None) -> bool:
        """Whether requests may name this tenant; None: whether they may name none, which they always may."""
        return (tenant, None) in self._hashers

    @property
    def max_branches(self) -> int:
        """The most answers that one request may ask for."""
        return self._scheduler.max_running

    @property
    def num_free_blocks(self) -> int:
        """Device blocks that nobody has. For the engine's thread."""
        return self._scheduler.num_free_blocks

    def submit(  # noqa: PLR0913 - what a request is
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        arrived_at: float,
        on_done: DoneCallback,
        on_token: TokenCallback | None = None,
        spans: RequestSpans | None = None,
        tenant: str | None = None,
        adapter: str | None = None,
    ) -> int:
        """Queues a request; returns its id for `cancel`. Does not block.

        :param tokens: the prompt, at least one.
        :param arrived_at: `MONOTONIC` time from which its TTFT counts.
        :param on_done: called exactly once for each branch in the engine's thread, unless this method raises.
        :param on_token: called before that with each new token; None is the cheapest.
        :param spans: of the request, the engine's from now on unless this method raises; None: it is not traced.
        :param tenant: the one whose cache the request uses, among those that it may name; None: it names none.
        :param adapter: the LoRA adapter that the request is computed with; None: none.
        :raises LimitExceededError: more tokens than one request may have.
        :raises InvalidInputError: no token, or one that the model does not have; more branches than may run.
        :raises ClosedError: the engine is stopping or has failed.
        """
        self._check_limits(tokens, sampling)
        if not self.serves(tenant):
            raise InvalidInputError(f"{tenant!r} is no tenant of this engine")
        request = Request(
            request_id=next(self._ids),
            tokens=list(tokens),
            sampling=sampling,
            hasher=self._hashers[tenant, adapter],
            on_done=on_done,
            arrived_at=arrived_at,
            on_token=on_token,
            spans=spans,
            adapter=adapter,
        )
        self._send(request)
        return request.request_id

    def cancel(self, request_id: int, reason: FinishReason = "cancelled", branch: int | None = None) -> None:
        """Ends a request after the present step; its `on_done` is called with what there is. Ended ones are ignored.

        :param reason: what `on_done` is told: `stop` when the requester has found the answer complete.
        :param branch: the index of the answer to end; None ends all.
        """
        with self._lock:
            self._inbox.append(_Ending(request_id, reason, branch))
        self._nudge()

    def reset_cache(self, on_done: ResetCallback) -> None:
        """Makes the engine forget all cached blocks after the present step: the device's and those of its own tiers.

        Running requests go on with the blocks that they have. The tiers forget in the background. What other engines
        share (the cache pool) stays.

        :raises ClosedError: the engine is stopping or has failed.
        """
        self._send(_Reset(on_done))

    def stop(self) -> None:
        """Lets `run` end after its present step."""
        with self._lock:
            self._stopping = True
        self._nudge()

    def warm_up(self) -> None:
        """A first pass over the model, which takes twice as long as the next."""
        self._scheduler.warm_up()

    def run(self) -> None:
        """Serves until `stop`, then ends what is left. Raises `KvtierError` when a step fails."""
        self.run_until(lambda: False)
        self.close()

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Serves until `condition` holds after a step, or `stop`. Raises `KvtierError` when a step fails."""
        try:
            while self._take_inbox() and not condition():
                if not self._scheduler.step() and not condition():
                    self._wait()
        except Exception as error:
            # Whoever waits for an answer must hear of it. What the step left behind is not to be trusted.
            log.exception("a step failed; the engine takes no more requests")
            with self._lock:
                self._failed = True
            self._abandon("failed")
            raise KvtierError("the engine failed; its log says why. Please report it, and start it again") from error

    def close(self) -> None:
        """Ends what is left. Idempotent; does not wait for anything."""
        with self._lock:
            self._stopping = True
            failed = self._failed
        if not failed:
            self._scheduler.end_all()
        self._abandon("cancelled")

    def _send(self, item: Request | _Reset) -> None:
        with self._lock:
            if self._stopping or self._failed:
                raise ClosedError("the engine has failed" if self._failed else "the engine is stopping")
            self._inbox.append(item)
        self._nudge()

    def _check_limits(self, tokens: Sequence[int], sampling: Sampling) -> None:
        if not tokens:
            raise InvalidInputError("the prompt is empty: give at least one token")
        most = self.limits.max_total_tokens
        if len(tokens) + sampling.max_tokens > most:
            whose = ", the model's own context" if self.limits.model_is_the_limit else ""
            raise LimitExceededError(
                f"{len(tokens)} prompt tokens and max_tokens {sampling.max_tokens} are more than the {most} tokens "
                f"that one request may have here{whose}; shorten the prompt or lower max_tokens"
            )
        if not 0 <= min(tokens) <= max(tokens) < self.limits.vocab_size:
            raise InvalidInputError(f"token ids must be from 0 to {self.limits.vocab_size - 1}")
        if not 1 <= sampling.num_branches <= self.max_branches:
            raise InvalidInputError(
                f"{sampling.num_branches} answers to one prompt, but this engine computes up to {self.max_branches} at "
                "once; ask for fewer"
            )

    def _take_inbox(self) -> bool:
        """False when it is time to stop."""
        with self._lock:
            if self._stopping or self._failed:
                return False
            self._inbox, items = [], self._inbox
        for index, item in enumerate(items):
            try:
                self._take(item)
            except Exception:
                # Whoever sent it and those behind must hear of it too.
                with self._lock:
                    self._inbox[:0] = items[index:]
                raise
        return True

    def _take(self, item: Request | _Ending | _Reset) -> None:
        if isinstance(item, Request):
            self._scheduler.add(item)
        elif isinstance(item, _Ending):
            self._scheduler.cancel(item.request_id, item.reason, item.branch)
        else:
            item.on_done(self._scheduler.reset_cache())

    def _wait(self) -> None:
        """Blocks until there may be something to do."""
        timeout_s = _STUCK_WAIT_S if self._scheduler.num_unfinished else _IDLE_WAIT_S
        if self._hierarchy is not None:
            self._hierarchy.wait(timeout_s)
            return
        with self._arrived:
            self._arrived.wait_for(lambda: bool(self._inbox) or self._stopping, timeout_s)

    def _nudge(self) -> None:
        if self._hierarchy is not None:
            self._hierarchy.nudge()
            return
        with self._arrived:
            self._arrived.notify()

    def _abandon(self, reason: FinishReason) -> None:
        """Tells all callers that it is over, those of the inbox too."""
        self._scheduler.abandon_all(reason)
        with self._lock:
            self._inbox, left = [], self._inbox
        for item in left:
            if isinstance(item, Request):
                for completion in item.completions(reason):
                    item.on_done(completion)
            elif isinstance(item, _Reset):
                item.on_done(None)
