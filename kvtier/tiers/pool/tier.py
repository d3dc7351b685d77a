"""The pool tier: the cache pool service seen from an engine. A pool that fails is a pool that misses."""

import logging
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from prometheus_client import Counter

from kvtier.clock import MONOTONIC, Clock
from kvtier.codec.sealing import SealingKeys
from kvtier.errors import CorruptBlockError, InvalidInputError, SealedBlockError, SealFault
from kvtier.identity.keys import StoreKey, TenantId, are_of_tenant
from kvtier.memory.pieces import Payload, Target
from kvtier.metrics import Metrics
from kvtier.protocol.retention import PinStatus
from kvtier.system.quiet_log import QuietLog
from kvtier.tiers.base import Item, Status, Usage, WriteStatus, require_pairs
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.common.call_guard import CallGuard
from kvtier.tiers.common.deadlines import RemoteCalls
from kvtier.tiers.common.health import Health
from kvtier.tiers.lease import Lease
from kvtier.tiers.pool.carriage import Carriage
from kvtier.tiers.pool.carried import Incoming, Outgoing, sealed_items, sealed_targets

_log = logging.getLogger(__name__)
_MAX_PIN_S = 10.0 * 365 * 86_400
"""The longest time of a pin that is asked for: more is the same to any pool, and has to fit into the message."""
_NOT_OFFERED = "not_offered"
_PIN_ANSWERS = (*(status.name.lower() for status in PinStatus), _NOT_OFFERED)
_LEND_SHARE = 0.5
"""The part of a call's time that `lease` may take: a pool that hangs is waited for again by the read that follows. A
late answer ends the connection, and with it all maps."""


class PoolTransport(Protocol):
    """One way to talk to the pool service. Any thread.

    Every verb takes at most `timeout_s` seconds and raises a `KvtierError` when there is no good answer:
    `UnavailableError`, `UnauthenticatedError`, `LimitExceededError`, or `InvalidInputError` for garbage.
    Batches are not split here.
    """

    def lookup(self, keys: Sequence[StoreKey], timeout_s: float) -> list[Status]:
        """A status per key, in order."""

    def read(
        self, keys: Sequence[StoreKey], into: Sequence[Incoming], timeout_s: float
    ) -> Iterator[tuple[int, CorruptBlockError | None]]:
        """Yields (index, None) as soon as `into[index]` holds that block's payload, verified against its key.

        What arrived and is not that block is yielded with the reason. Blocks that are not there are not yielded.
        What was yielded before an exception counts.
        """

    def lease(
        self, keys: Sequence[StoreKey], nbytes: int, ready: Collection[int], timeout_s: float, *, verified: bool
    ) -> Lease | None:
        """Lends blocks in the pool's memory; None: it lends nothing. Does not raise: the read that follows finds out
        what fails."""

    def write(self, items: Sequence[Item[Outgoing]], timeout_s: float) -> list[WriteStatus]:
        """A status per block, in order."""

    def discard(self, keys: Sequence[StoreKey], timeout_s: float) -> int:
        """Forgets these keys; returns how many were there."""

    def pin(self, keys: Sequence[StoreKey], ttl_ms: int, timeout_s: float) -> list[PinStatus] | None:
        """Pins blocks for `ttl_ms`; a status per key, in order. None when the pool has no pins, which is no failure."""

    def unpin(self, keys: Sequence[StoreKey], timeout_s: float) -> int | None:
        """Ends pins; returns how many there were, None when the pool has no pins."""

    def usage(self, timeout_s: float) -> Usage:
        """Blocks and bytes of this tenant in the tier of the pool that keeps most of them, and that tier's capacity."""

    def close(self) -> None:
        """Ends the connection. Idempotent."""


def counted_pins(tier: str, metrics: Metrics) -> dict[str, Counter]:
    """Blocks that a pool was asked to pin, by its answer."""
    return {status: metrics.pins.labels(tier, status) for status in _PIN_ANSWERS}


class PoolTier:
    """`Tier` over a cache pool, for one tenant. Blocks may also be in `Pieces`.

    No call takes longer than `call_timeout_s`, however many batches it is split into; what did not come in
    time is MISS or FAILED. After some failures in a row the pool is left alone: calls are answered MISS and
    FAILED at once, until it answers probes, for which none of them waits. Failures are counted in `io_errors` by
    exception (`BreakerOpen` for calls not made), and logged when the breaker opens and closes. Every block is
    verified against the key asked for; what does not hold is a MISS, and counted in `corrupt_blocks`.

    Any thread. Blocks up to the deadline.
    """

    def __init__(  # noqa: PLR0913 - what may be set, by keyword
        self,
        transport: PoolTransport,
        tenant: TenantId,
        *,
        metrics: Metrics,
        breaker: CircuitBreaker,
        call_timeout_s: float = 5.0,
        max_batch_bytes: int = 128 << 20,
        max_batch_blocks: int = 16_384,
        sealing: SealingKeys | None = None,
        name: str = "pool",
        clock: Clock = MONOTONIC,
    ) -> None:
        """
        :param transport: owned from now on.
        :param tenant: the tenant whose credentials the transport has. Keys of another raise `InvalidInputError`.
        :param call_timeout_s: seconds, of each call of a verb.
        :param max_batch_bytes: payload bytes in one request; larger batches are split. At most the pool's limit.
        :param max_batch_blocks: blocks in one request; larger batches are split. At most the pool's limit.
        :param sealing: keys that blocks are sealed with before they leave this process, and opened when they are back.
            Nothing else is read then, and nothing is lent.
        """
        self._transport = transport
        self._tenant = tenant
        self._metrics = metrics
        self._call_timeout_s = call_timeout_s
        self._name = name
        self._carriage = None if sealing is None else Carriage(sealing)
        self._clock = clock
        self._health = Health(
            name, metrics=metrics, breaker=breaker, log=_log, probe=lambda: transport.usage(call_timeout_s)
        )
        self._calls = RemoteCalls(
            self._health,
            call_timeout_s=call_timeout_s,
            max_batch_bytes=max_batch_bytes,
            max_batch_blocks=max_batch_blocks,
            clock=clock,
        )
        self._pins = counted_pins(name, metrics)
        self._guard = CallGuard(f"tier {name}")
        self._dropped = QuietLog(_log)
        self._said_without_pins = False
        """Whether it was logged that the pool has no pins. Written whole: any thread."""

    @property
    def name(self) -> str:
        return self._name

    @property
    def is_left_alone(self) -> bool:
        """Whether the pool has failed of late and is not asked but for probes: others are answered MISS and FAILED."""
        return self._health.is_left_alone

    def lookup(self, keys: Sequence[StoreKey]) -> list[Status]:
        """Asks the pool for a status per key, in order; MISS where no answer came in time."""
        self._require_own(keys)
        statuses = [Status.MISS] * len(keys)

        def ask(batch: slice, timeout_s: float) -> None:
            statuses[batch] = self._transport.lookup(keys[batch], timeout_s)

        with self._guard:
            self._calls.in_batches("lookup", [0] * len(keys), ask)
        return statuses

    def read(self, keys: Sequence[StoreKey], into: Sequence[Target]) -> list[Status]:
        """Fills `into[i]` with the payload of `keys[i]`, verified; a status per key, MISS for what did not come in
        time."""
        require_pairs(keys, into)
        self._require_own(keys)
        statuses = [Status.MISS] * len(keys)

        targets = sealed_targets(keys, into, self._carriage)
        unopened: list[StoreKey] = []

        def ask(batch: slice, timeout_s: float) -> None:
            for offset, error in self._transport.read(keys[batch], targets[batch], timeout_s):
                if error is None:
                    statuses[batch.start + offset] = Status.HIT
                elif self._note_bad(error):
                    unopened.append(keys[batch.start + offset])

        with self._guard:
            deadline = self._clock() + self._call_timeout_s
            self._calls.in_batches("read", [len(target) for target in targets], ask)
            left_s = deadline - self._clock()
            if unopened and left_s > 0:  # as long as it is there, nobody can store it again
                self._discard(unopened, left_s)
        return statuses

    def lease(
        self, keys: Sequence[StoreKey], nbytes: int, ready: Collection[int], *, verified: bool = True
    ) -> Lease | None:
        """Lends blocks in the pool's memory. None where the pool does not share its memory, while it fails, and of
        blocks that have to be opened."""
        self._require_own(keys)
        if self._carriage is not None or self._health.is_left_alone:
            return None
        with self._guard:
            timeout_s = _LEND_SHARE * self._call_timeout_s
            return self._transport.lease(keys, nbytes, ready, timeout_s, verified=verified)

    def write(self, items: Sequence[Item[Payload]]) -> list[WriteStatus]:
        """Has the pool store payloads; a status per block, in order. FAILED also when the pool stored the block and its
        answer was lost."""
        self._require_own([key for key, _, _ in items])
        statuses = [WriteStatus.FAILED] * len(items)
        outgoing = sealed_items(items, self._carriage)

        def ask(batch: slice, timeout_s: float) -> None:
            statuses[batch] = self._transport.write(outgoing[batch], timeout_s)

        with self._guard:
            self._calls.in_batches("write", [len(payload) for _, payload, _ in outgoing], ask)
        return statuses

    def discard(self, keys: Sequence[StoreKey]) -> int:
        """Forgets these keys in the pool; returns how many were there. A pool that cannot be reached discards nothing:
        the counter tells."""
        self._require_own(keys)
        with self._guard:
            return self._discard(keys, self._call_timeout_s)

    def pin(self, keys: Sequence[StoreKey], ttl_s: float) -> int:
        """Asks the pool to keep blocks in its memory for `ttl_s` seconds; returns how many it keeps.

        For what will be wanted again and again, e.g. a system prompt. Best effort, the first keys first: the pool pins
        what is in its memory now, as far as the tenant has room for pins, and for a day at most unless it was told
        otherwise; `pins` counts the answers. It forgets pins when it restarts, so ask again now and then. Pinned again,
        a block stays until the later of both ends. A pool without pins keeps nothing, which is logged once.

        :raises InvalidInputError: a key of another tenant, or no time at all.
        """
        self._require_own(keys)
        if not ttl_s > 0:
            raise InvalidInputError(f"tier {self._name}: a pin for {ttl_s} s; must be above 0")
        ttl_ms = max(1, round(min(ttl_s, _MAX_PIN_S) * 1000))
        num_pinned = 0

        def ask(batch: slice, timeout_s: float) -> None:
            nonlocal num_pinned
            statuses = self._transport.pin(keys[batch], ttl_ms, timeout_s)
            if statuses is None:
                self._note_without_pins(batch.stop - batch.start)
                return
            num_pinned += statuses.count(PinStatus.PINNED)
            for status in PinStatus:
                self._pins[status.name.lower()].inc(statuses.count(status))

        with self._guard:
            self._calls.in_batches("pin", [0] * len(keys), ask)
        return num_pinned

    def unpin(self, keys: Sequence[StoreKey]) -> int:
        """Ends pins of the tenant, whichever engine asked for them; returns how many there were. Best effort, as
        `pin`."""
        self._require_own(keys)
        counts: list[int] = []

        def ask(batch: slice, timeout_s: float) -> None:
            counts.append(self._transport.unpin(keys[batch], timeout_s) or 0)

        with self._guard:
            self._calls.in_batches("unpin", [0] * len(keys), ask)
        return sum(counts)

    def usage(self) -> Usage:
        """Returns what the pool holds of the tenant, and its capacity. All numbers are zero when the pool does not
        answer."""
        answers: list[Usage] = []
        with self._guard:
            self._calls.attempt("usage", lambda: answers.append(self._transport.usage(self._call_timeout_s)))
        return answers[0] if answers else Usage(0, 0, 0)

    def check(self) -> None:
        """Raises `ClosedError` after `close`, and verifies nothing: there are no books on this side."""
        with self._guard:
            pass

    def close(self) -> None:
        """Waits for calls in flight, at most until their deadline, and closes the transport. Idempotent."""
        self._health.close()
        if self._guard.close():
            self._transport.close()
            if self._carriage is not None:
                self._carriage.close()

    def _discard(self, keys: Sequence[StoreKey], timeout_s: float) -> int:
        counts: list[int] = []

        def ask(batch: slice, left_s: float) -> None:
            counts.append(self._transport.discard(keys[batch], left_s))

        self._calls.in_batches("discard", [0] * len(keys), ask, timeout_s)
        return sum(counts)

    def _note_bad(self, error: CorruptBlockError) -> bool:
        """True: a block that nobody can open, to be discarded."""
        self._metrics.corrupt_blocks.labels(self._name).inc()
        self._dropped.warning(f"tier {self._name}: block dropped: {error}")
        if not isinstance(error, SealedBlockError):
            return False
        self._metrics.unopened_blocks.labels(self._name, error.fault.value).inc()
        return error.fault is not SealFault.NEWER_KEY

    def _note_without_pins(self, num_blocks: int) -> None:
        self._pins[_NOT_OFFERED].inc(num_blocks)
        if not self._said_without_pins:
            self._said_without_pins = True
            _log.warning(
                "tier %s: the pool pins no blocks: it is older, or max_pin_s or pin_share is 0",
                self._name,
                extra={"tier": self._name},
            )

    def _require_own(self, keys: Sequence[StoreKey]) -> None:
        if not are_of_tenant(keys, self._tenant):
            raise InvalidInputError(f"tier {self._name}: a key of another tenant than the one it is connected for")
