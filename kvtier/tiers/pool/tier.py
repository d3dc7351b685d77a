"""The pool tier: the cache pool service seen from an engine. A pool that fails is a pool that misses."""

import logging
from collections.abc import Iterator, Sequence
from typing import Protocol

from kvtier.clock import MONOTONIC, Clock
from kvtier.errors import CorruptBlockError, InvalidInputError
from kvtier.keys import TENANT_ID_BYTES, StoreKey, TenantId
from kvtier.metrics import Metrics
from kvtier.quiet_log import QuietLog
from kvtier.tiers.base import ReadableBuffer, Status, Usage, WriteStatus, require_pairs
from kvtier.tiers.breaker import CircuitBreaker
from kvtier.tiers.gate import CallGate
from kvtier.tiers.remote import RemoteCalls

_log = logging.getLogger(__name__)


class PoolTransport(Protocol):
    """One way to talk to the pool service. Any thread.

    Every verb takes at most `timeout_s` seconds and raises a `KvtierError` when there is no good answer:
    `UnavailableError`, `UnauthenticatedError`, `LimitExceededError`, or `InvalidInputError` for garbage.
    Batches are not split here.
    """

    def lookup(self, keys: Sequence[StoreKey], timeout_s: float) -> list[Status]:
        """A status per key, in order."""

    def read(
        self, keys: Sequence[StoreKey], into: Sequence[memoryview], timeout_s: float
    ) -> Iterator[tuple[int, CorruptBlockError | None]]:
        """Yields (index, None) as soon as `into[index]` holds that block's payload, verified against its key.

        What arrived and is not that block is yielded with the reason. Blocks that are not there are not yielded.
        What was yielded before an exception counts.
        """

    def write(self, items: Sequence[tuple[StoreKey, ReadableBuffer]], timeout_s: float) -> list[WriteStatus]:
        """A status per block, in order."""

    def discard(self, keys: Sequence[StoreKey], timeout_s: float) -> int:
        """How many were there."""

    def usage(self, timeout_s: float) -> Usage:
        """Of this tenant, in the tier of the pool that keeps most of it; capacity of that tier."""

    def close(self) -> None:
        """Ends the connection. Idempotent."""


class PoolTier:
    """`Tier` over a cache pool, for one tenant.

    No call takes longer than `call_timeout_s`, however many batches it is split into; what did not come in
    time is MISS or FAILED. After some failures in a row the pool is left alone: calls are answered MISS and
    FAILED at once, until a probe succeeds. Failures are counted in `io_errors` by exception (`BreakerOpen`
    for calls not made), and logged when the breaker opens and closes. Every block is verified against the
    key asked for; what does not hold is a MISS, and counted in `corrupt_blocks`.

    Any thread. Blocks up to the deadline.
    """

    def __init__(
        self,
        transport: PoolTransport,
        tenant: TenantId,
        *,
        metrics: Metrics,
        breaker: CircuitBreaker,
        call_timeout_s: float = 5.0,
        max_batch_bytes: int = 128 << 20,
        max_batch_blocks: int = 16_384,
        name: str = "pool",
        clock: Clock = MONOTONIC,
    ) -> None:
        """
        :param transport: owned from now on.
        :param tenant: the tenant whose credentials the transport has. Keys of another raise `InvalidInputError`.
        :param call_timeout_s: seconds, of each call of a verb.
        :param max_batch_bytes: payload bytes in one request; larger batches are split. At most the pool's limit.
        :param max_batch_blocks: blocks in one request, likewise.
        """
        self._transport = transport
        self._tenant = tenant
        self._metrics = metrics
        self._call_timeout_s = call_timeout_s
        self._name = name
        self._calls = RemoteCalls(
            name,
            metrics=metrics,
            breaker=breaker,
            log=_log,
            call_timeout_s=call_timeout_s,
            max_batch_bytes=max_batch_bytes,
            max_batch_blocks=max_batch_blocks,
            clock=clock,
        )
        self._gate = CallGate(f"tier {name}")
        self._dropped = QuietLog(_log)

    @property
    def name(self) -> str:
        return self._name

    def lookup(self, keys: Sequence[StoreKey]) -> list[Status]:
        """See `Tier.lookup`."""
        self._require_own(keys)
        statuses = [Status.MISS] * len(keys)

        def ask(batch: slice, timeout_s: float) -> None:
            statuses[batch] = self._transport.lookup(keys[batch], timeout_s)

        with self._gate:
            self._calls.in_batches("lookup", [0] * len(keys), ask)
        return statuses

    def read(self, keys: Sequence[StoreKey], into: Sequence[memoryview]) -> list[Status]:
        """See `Tier.read`."""
        require_pairs(keys, into)
        self._require_own(keys)
        statuses = [Status.MISS] * len(keys)

        def ask(batch: slice, timeout_s: float) -> None:
            for offset, error in self._transport.read(keys[batch], into[batch], timeout_s):
                if error is None:
                    statuses[batch.start + offset] = Status.HIT
                else:
                    self._metrics.corrupt_blocks.labels(self._name).inc()
                    self._dropped.warning(f"tier {self._name}: block dropped: {error}")

        with self._gate:
            self._calls.in_batches("read", [len(buffer) for buffer in into], ask)
        return statuses

    def write(self, items: Sequence[tuple[StoreKey, ReadableBuffer]]) -> list[WriteStatus]:
        """See `Tier.write`. FAILED also when the pool stored the block and its answer was lost."""
        self._require_own([key for key, _ in items])
        statuses = [WriteStatus.FAILED] * len(items)

        def ask(batch: slice, timeout_s: float) -> None:
            statuses[batch] = self._transport.write(items[batch], timeout_s)

        with self._gate:
            self._calls.in_batches("write", [len(payload) for _, payload in items], ask)
        return statuses

    def discard(self, keys: Sequence[StoreKey]) -> int:
        """See `Tier.discard`. A pool that cannot be reached discards nothing: the counter tells."""
        self._require_own(keys)
        counts: list[int] = []

        def ask(batch: slice, timeout_s: float) -> None:
            counts.append(self._transport.discard(keys[batch], timeout_s))

        with self._gate:
            self._calls.in_batches("discard", [0] * len(keys), ask)
        return sum(counts)

    def usage(self) -> Usage:
        """See `Tier.usage`. All zero when the pool does not answer."""
        answers: list[Usage] = []
        with self._gate:
            self._calls.attempt("usage", lambda: answers.append(self._transport.usage(self._call_timeout_s)))
        return answers[0] if answers else Usage(0, 0, 0)

    def check(self) -> None:
        """See `Tier.check`. There are no books on this side."""
        with self._gate:
            pass

    def close(self) -> None:
        """See `Tier.close`. Waits for calls in flight, at most their deadline."""
        if self._gate.close():
            self._transport.close()

    def _require_own(self, keys: Sequence[StoreKey]) -> None:
        if any(key[:TENANT_ID_BYTES] != self._tenant for key in keys):
            raise InvalidInputError(f"tier {self._name}: a key of another tenant than the one it is connected for")
