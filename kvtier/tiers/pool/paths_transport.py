"""Several ways to one cache pool: the best that works carries the calls."""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvtier.clock import MONOTONIC, Clock
from kvtier.errors import CorruptBlockError, InvalidInputError, KvtierError, UnauthenticatedError, UnavailableError
from kvtier.identity.keys import StoreKey
from kvtier.protocol.retention import PinStatus
from kvtier.system.quiet_log import QuietLog
from kvtier.tiers.base import Item, Status, Usage, WriteStatus
from kvtier.tiers.lease import Lease
from kvtier.tiers.pool.carried import Incoming, Outgoing
from kvtier.tiers.pool.pause import Pause
from kvtier.tiers.pool.tier import PoolTransport

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Path:
    """One way."""

    name: str
    transport: PoolTransport
    pause: Pause


class PathsTransport:
    """`PoolTransport` over the first of several ways that works. Any thread.

    A way that cannot be had, or refuses us, is passed over for some seconds, and then tried again. When none is left,
    each is tried: the tier's breaker decides how often.
    """

    def __init__(self, paths: Sequence[tuple[str, PoolTransport]], *, clock: Clock = MONOTONIC) -> None:
        """:param paths: (address for the log, transport), the best first; owned from now on."""
        self._paths = [_Path(name, transport, Pause(clock)) for name, transport in paths]
        self._clock = clock
        self._failed = QuietLog(_log)

    def lookup(self, keys: Sequence[StoreKey], timeout_s: float) -> list[Status]:
        """A status per key, in order, from the first way that answers."""
        return self._first(timeout_s, lambda transport, left_s: transport.lookup(keys, left_s))

    def read(
        self, keys: Sequence[StoreKey], into: Sequence[Incoming], timeout_s: float
    ) -> Iterator[tuple[int, CorruptBlockError | None]]:
        """Reads blocks by the first way that answers, and yields (index, None) for each that has come, or why it is not
        that block. A way that fails in the middle is not replaced: the rest are misses."""

        def begin(
            transport: PoolTransport, left_s: float
        ) -> tuple[list[tuple[int, CorruptBlockError | None]], Iterator[tuple[int, CorruptBlockError | None]]]:
            blocks = iter(transport.read(keys, into, left_s))
            first = next(blocks, None)
            return [first] if first is not None else [], blocks

        first, rest = self._first(timeout_s, begin)
        yield from first
        yield from rest

    def lease(
        self, keys: Sequence[StoreKey], nbytes: int, ready: Collection[int], timeout_s: float, *, verified: bool
    ) -> Lease | None:
        """Lends blocks by the first way that lends any. None: no way does."""
        leases = (path.transport.lease(keys, nbytes, ready, timeout_s, verified=verified) for path in self._usable())
        return next((lease for lease in leases if lease is not None), None)

    def write(self, items: Sequence[Item[Outgoing]], timeout_s: float) -> list[WriteStatus]:
        """Writes blocks by the first way that answers; a status per block, in order."""
        return self._first(timeout_s, lambda transport, left_s: transport.write(items, left_s))

    def discard(self, keys: Sequence[StoreKey], timeout_s: float) -> int:
        """Forgets keys by the first way that answers; returns how many were there."""
        return self._first(timeout_s, lambda transport, left_s: transport.discard(keys, left_s))

    def pin(self, keys: Sequence[StoreKey], ttl_ms: int, timeout_s: float) -> list[PinStatus] | None:
        """Pins blocks by the first way that answers; a status per key, in order. None when the pool has no pins."""
        return self._first(timeout_s, lambda transport, left_s: transport.pin(keys, ttl_ms, left_s))

    def unpin(self, keys: Sequence[StoreKey], timeout_s: float) -> int | None:
        """Ends pins by the first way that answers; returns how many there were. None when the pool has no pins."""
        return self._first(timeout_s, lambda transport, left_s: transport.unpin(keys, left_s))

    def usage(self, timeout_s: float) -> Usage:
        """How full the pool is for this tenant, as the first way that answers says."""
        return self._first(timeout_s, lambda transport, left_s: transport.usage(left_s))

    def close(self) -> None:
        """Ends the connections of all ways. Idempotent."""
        for path in self._paths:
            path.transport.close()

    def _first(self, timeout_s: float, call: Callable[[PoolTransport, float], _T]) -> _T:
        """What the first way answers that can be had within the time."""
        deadline = self._clock() + timeout_s
        failure: KvtierError = UnavailableError("no way to the pool")
        for path in self._usable():
            left_s = deadline - self._clock()
            if left_s <= 0:
                break
            try:
                return call(path.transport, left_s)
            except (UnavailableError, UnauthenticatedError, InvalidInputError) as error:
                path.pause.begin()
                failure = error
                self._failed.warning(f"{path.name} cannot be had, another way is tried: {error}")
        raise failure

    def _usable(self) -> list[_Path]:
        """The ways that have not failed of late; all of them when there are none."""
        return [path for path in self._paths if path.pause.is_over] or self._paths
