"""What clients on this host hold of the pool's memory, and when it ends."""

import itertools
import logging
import threading

from kvtier.clock import MONOTONIC, Clock
from kvtier.identity.keys import TenantId
from kvtier.store.store import Store
from kvtier.system.quiet_log import QuietLog
from kvtier.system.ticking_thread import TickingThread
from kvtier_pool.block.client_memory import PART_OF_SHARE, ClientLimits, ClientMemory
from kvtier_pool.block.holdings import Holdings
from kvtier_pool.metrics import PoolMetrics

_log = logging.getLogger(__name__)
_TICK_S = 0.25
"""Seconds between two looks for leases and writes that are over."""


class SharedClients:
    """All clients that share memory, and the thread that ends their leases and writes in time. Any thread."""

    def __init__(self, core: Store, metrics: PoolMetrics, limits: ClientLimits, *, clock: Clock = MONOTONIC) -> None:
        """`start` starts the thread."""
        self._core = core
        self._metrics = metrics
        self.limits = limits
        self._clock = clock
        self._writers = itertools.count(1)
        self._lock = threading.Lock()
        self._clients: set[ClientMemory] = set()
        """Guarded by _lock."""
        self._holdings: dict[TenantId, Holdings] = {}
        """What each tenant that has connections holds. Guarded by _lock."""
        self._warnings = QuietLog(_log, clock=clock)
        self._thread = TickingThread("kvtier-leases", _TICK_S, self._look)
        metrics.shared_bytes.set_function(self._held_bytes)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.alive

    def max_held_bytes(self, tenant: TenantId) -> int:
        """What a connection of this tenant should hold at most, as shares are now. Clients choose the size of their
        requests by it: one that is larger than what the tenant may hold would be refused as a whole, every time."""
        most_bytes = self._core.owed_bytes(tenant) // PART_OF_SHARE
        return min(self.limits.max_held_bytes, most_bytes) if most_bytes else self.limits.max_held_bytes

    def open(self, tenant: TenantId) -> ClientMemory:
        """Gives a new connection its memory, which goes back by `end`."""
        with self._lock:
            holdings = self._holdings.setdefault(tenant, Holdings(self._thread.wake))
            holdings.num_clients += 1
            client = ClientMemory(self._core, tenant, next(self._writers), holdings, self.limits, self._clock)
            self._clients.add(client)
        return client

    def end(self, client: ClientMemory) -> None:
        """The connection is gone."""
        with self._lock:
            self._clients.discard(client)
        client.close()
        with self._lock:
            holdings = self._holdings[client.tenant]
            holdings.num_clients -= 1
            if not holdings.num_clients:
                del self._holdings[client.tenant]

    def stop(self) -> None:
        """Ends the thread. Idempotent."""
        self._thread.stop()

    def _look(self) -> bool:
        """Ends what is due, on the thread for it; whether anything is held still."""
        now_s = self._clock()
        for client in self._snapshot():
            num_ended = client.end_leases(now_s)
            if num_ended:
                self._metrics.expired_leases.inc(num_ended)
                _log.info("%d leases ended by their deadline: a client was stopped, or is very slow", num_ended)
            if num_given_up := client.end_writes(now_s):
                self._warnings.warning(
                    f"slots of {num_given_up} blocks are given up, which were not written to within "
                    f"{self.limits.max_prepared_s:g} s: a client was stopped, or is very slow"
                )
        with self._lock:
            return not all(holdings.is_empty for holdings in self._holdings.values())

    def _snapshot(self) -> list[ClientMemory]:
        with self._lock:
            return list(self._clients)

    def _held_bytes(self) -> int:
        return sum(client.held_bytes for client in self._snapshot())
