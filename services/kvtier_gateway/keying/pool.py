"""What the pool has of a prompt: one exact lookup of its keys, which never blocks the event loop."""

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvtier.build.tiers import POOL, pool_access, shared_tier
from kvtier.config import Config
from kvtier.config.tls_files import pool_tls
from kvtier.errors import KvtierError
from kvtier.identity.keys import BlockKey, NamespaceId, rank_keys
from kvtier.metrics import OPEN_BREAKERS, Metrics
from kvtier.net.tls import client_tls
from kvtier.tiers.base import Status
from kvtier.tiers.common.metered import TimedCalls
from kvtier.tiers.pool.access import plain_calls
from kvtier_gateway.keying.loop_lookup import LoopLookup
from kvtier_gateway.metrics import GatewayMetrics

_THREADS = 4
_MOST_PENDING = 64
"""Lookups that may wait for a thread: a pool that hangs must not gather the prompts of all requests."""


class PoolLookup:
    """Asks the pool with the credentials of the tenants that the gateway has tokens of. Event loop only.

    Small prompts are asked for by the event loop itself, others, and all over TLS and gRPC, in threads.
    """

    def __init__(self, config: Config, metrics: GatewayMetrics, timeout_s: float) -> None:
        """Connects to nothing yet.

        :param metrics: its registry takes the counters of the pool's client, too.
        :param timeout_s: how long a request waits for an answer.
        :raises ConfigError: credentials or files for TLS are no good.
        """
        self._timeout_s = timeout_s
        self._stack = contextlib.ExitStack()
        self._tenants = frozenset(name for name, table in config.tenants.items() if table.token is not None)
        self._metrics = Metrics(metrics.registry)
        self._lookups = metrics.pool_lookups
        of_tenants = config.model_copy(update={"tenant": None, "gateway_tenants": sorted(self._tenants)})
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvtier-lookup")
        self._shared = None
        self._on_loop: dict[str, LoopLookup] = {}
        """By tenant, where the way to the pool is a plain socket."""
        if self._tenants and config.pool.address:
            self._shared = self._stack.enter_context(shared_tier(of_tenants, (), self._metrics))
            counts = TimedCalls(POOL, self._metrics)
            tls = client_tls(pool_tls(config), config.pool.tls_server_name)
            of_call_s = config.pool.call_timeout_s
            for tenant in self._tenants:
                calls = plain_calls(pool_access(of_tenants, tenant, (), tls))
                if calls is not None:
                    self._on_loop[tenant] = LoopLookup(calls, self._threads, counts, timeout_s=of_call_s)
        self._num_pending = 0

    async def num_leading(
        self, tenant: str, keys: Sequence[BlockKey], namespaces: Collection[NamespaceId]
    ) -> int | None:
        """How many of the leading blocks the pool has in all namespaces; None where nobody knows."""
        if self._shared is None or tenant not in self._tenants or not keys or not namespaces:
            return None
        on_loop = self._on_loop.get(tenant)
        try:
            async with asyncio.timeout(self._timeout_s):
                found = None if on_loop is None else await _num_leading(on_loop, keys, namespaces)
                if found is None:
                    if self._num_pending >= _MOST_PENDING:
                        self._lookups.labels("not_asked").inc()
                        return None
                    found = await self._in_thread(keys, tuple(namespaces))
                    if found is not None and on_loop is not None:
                        on_loop.open()
        except TimeoutError:
            self._lookups.labels("late").inc()
            return None
        except KvtierError:
            found = None
        self._lookups.labels("answered" if found is not None else "failed").inc()
        return found

    def close(self) -> None:
        """Ends connections. Waits for lookups under way, each up to `pool.call_timeout_s`."""
        for on_loop in self._on_loop.values():
            on_loop.close()
        self._threads.shutdown(cancel_futures=True)
        self._stack.close()

    async def _in_thread(self, keys: Sequence[BlockKey], namespaces: Sequence[NamespaceId]) -> int | None:
        self._num_pending += 1
        asked = asyncio.get_running_loop().run_in_executor(self._threads, self._ask, keys, namespaces)
        asked.add_done_callback(self._done)
        return await asyncio.shield(asked)

    def _ask(self, keys: Sequence[BlockKey], namespaces: Sequence[NamespaceId]) -> int | None:
        assert self._shared is not None
        num_leading = len(keys)
        for namespace in namespaces:
            num_leading = _num_hits(self._shared.tier.lookup(rank_keys(keys[:num_leading], namespace)))
        # A pool that fails answers misses: whether it does, its breaker says.
        if not num_leading and self._metrics.levels.values().get((OPEN_BREAKERS, POOL)):
            return None
        return num_leading

    def _done(self, asked: "asyncio.Future[int | None]") -> None:
        self._num_pending -= 1
        if not asked.cancelled():
            asked.exception()  # it is told to whoever waits for it, and to nobody if nobody does


async def _num_leading(
    on_loop: LoopLookup, keys: Sequence[BlockKey], namespaces: Collection[NamespaceId]
) -> int | None:
    """Asks for one namespace after the other, as far as all before have the blocks. None: ask in a thread."""
    num_leading = len(keys)
    for namespace in namespaces:
        if not num_leading:
            break
        if not on_loop.has_room(num_leading):
            return None
        statuses = await on_loop.ask(rank_keys(keys[:num_leading], namespace))
        if statuses is None:
            return None
        num_leading = _num_hits(statuses)
    return num_leading


def _num_hits(statuses: Sequence[Status]) -> int:
    """The number of hits before the first miss."""
    return next((i for i, status in enumerate(statuses) if status is not Status.HIT), len(statuses))
