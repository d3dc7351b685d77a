"""Asking the shared tier in the background, so that a step never waits for a network."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kvtier.keys import ChainHash, NamespaceId, TenantId, store_key
from kvtier.tiers.base import Status, Tier

_log = logging.getLogger(__name__)


class SharedLookups:
    """Looks up chain hashes for all ranks at once. Scheduler thread only; `ask` does not block."""

    def __init__(
        self,
        tier: Tier,
        tenant: TenantId,
        namespaces: Sequence[NamespaceId],
        *,
        max_asking: int,
        num_threads: int,
        on_answer: Callable[[], None],
    ) -> None:
        """:param on_answer: called from another thread when an answer has come."""
        self._tier, self._tenant, self._namespaces = tier, tenant, list(namespaces)
        self._max_asking, self._on_answer = max_asking, on_answer
        self._threads = ThreadPoolExecutor(num_threads, "kvtier-lookup")
        self._asking: set[Future[list[Status]]] = set()

    @property
    def name(self) -> str:
        return self._tier.name

    def ask(self, hashes: Sequence[ChainHash]) -> Future[list[Status]] | None:
        """A status per hash: HIT when every namespace has it. None when too many lookups are under way."""
        # Abandoned lookups of a hung tier count until its deadline ends them.
        self._asking = {future for future in self._asking if not future.done()}
        if len(self._asking) >= self._max_asking:
            return None
        future = self._threads.submit(self._lookup, list(hashes))
        self._asking.add(future)
        future.add_done_callback(lambda _: self._on_answer())
        return future

    def close(self) -> None:
        """Waits for the lookups under way, which the tier's deadlines bound."""
        self._threads.shutdown(cancel_futures=True)

    def _lookup(self, hashes: list[ChainHash]) -> list[Status]:
        keys = [store_key(self._tenant, n, h) for n in self._namespaces for h in hashes]
        try:
            answers = [status for _, status in zip(keys, self._tier.lookup(keys), strict=True)]
        except Exception:
            # Tiers do not raise. A bug in one must not reach the scheduler, which would end the engine.
            _log.exception("looking up %d blocks in %s failed", len(hashes), self._tier.name)
            return [Status.MISS] * len(hashes)
        per_rank = [answers[start : start + len(hashes)] for start in range(0, len(answers), len(hashes))]
        return [_weakest(statuses) for statuses in zip(*per_rank, strict=True)]


def _weakest(statuses: tuple[Status, ...]) -> Status:
    """What all ranks together have: one miss is a miss, else one pending is pending."""
    if Status.MISS in statuses:
        return Status.MISS
    return Status.PENDING if Status.PENDING in statuses else Status.HIT
