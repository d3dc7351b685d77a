"""What the pool has of a prompt: one exact lookup of its keys, which never blocks the event loop."""

import asyncio
import contextlib
from collections.abc import Collection, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvtier.build.tiers import POOL, pool_access, shared_tier
from kvtier.config import Config
from kvtier.config.tls_files import pool_tls
from kvtier.errors import KvtierError
from kvtier.identity.keys import BlockKey, NamespaceId, rank_keys, tenant_id
from kvtier.metrics import Metrics
from kvtier.net.tls import client_tls
from kvtier.system.started_threads import started_threads
from kvtier.tiers.base import Status
from kvtier.tiers.common.metered import TimedCalls
from kvtier.tiers.pool.access import plain_calls
from kvtier_gateway.keying.loop_lookup import MOST_KEYS, LoopLookup
from kvtier_gateway.metrics import GatewayMetrics

_Sent = asyncio.Future[list[Status] | None] | None
_THREADS = 4
_MOST_PENDING = 64
"""Lookups that may wait for a thread: a pool that hangs must not gather the prompts of all requests."""
_PATIENCE = 10
"""How many times as long as a request waits, the loop's connection waits for an answer before it is given up."""


class PoolLookup:
    """Asks the pool with the credentials of the tenants that the gateway has tokens of. Event loop only.

    Prompts of up to `MOST_KEYS` blocks are asked for by the event loop itself; larger ones, and all over TLS and gRPC,
    in threads.
    """

    def __init__(self, config: Config, metrics: GatewayMetrics, timeout_s: float) -> None:
        """Connects to nothing yet.

        :param metrics: its registry takes the counters of the pool's client, too.
        :param timeout_s: how long a request waits for an answer.
        :raises ConfigError: credentials or files for TLS are no good.
        """
        self._timeout_s = timeout_s
        self._tenants = frozenset(name for name, table in config.tenants.items() if table.token is not None)
        self._metrics = Metrics(metrics.registry)
        self._lookups = metrics.pool_lookups
        of_tenants = config.model_copy(update={"tenant": None, "gateway_tenants": sorted(self._tenants)})
        self._shared = None
        self._on_loop: dict[str, LoopLookup] = {}
        """The names are those of tenants whose way to the pool is a plain socket."""
        self._num_pending = 0
        with contextlib.ExitStack() as stack:
            self._threads = _executor(stack, _THREADS, "kvtier-lookup")
            if self._tenants and config.pool.address:
                self._shared = stack.enter_context(shared_tier(of_tenants, (), self._metrics))
                self._begin_on_loop(of_tenants, stack)
            self._stack = stack.pop_all()

    def _begin_on_loop(self, config: Config, stack: contextlib.ExitStack) -> None:
        counts = TimedCalls(POOL, self._metrics)
        # Not in the lookups' threads: an address that hangs would keep them.
        connecting = _executor(stack, 1, "kvtier-connect")
        tls = client_tls(pool_tls(config), config.pool.tls_server_name)
        patience_s = min(config.pool.call_timeout_s, _PATIENCE * self._timeout_s)
        for tenant in self._tenants:
            if ways := plain_calls(pool_access(config, tenant, (), tls)):
                self._on_loop[tenant] = LoopLookup(tenant, ways, connecting, counts, timeout_s=patience_s)
                stack.callback(self._on_loop[tenant].close)

    def num_leading(
        self, tenant: str, keys: Sequence[BlockKey], namespaces: Collection[NamespaceId]
    ) -> Coroutine[None, None, int | None]:
        """How many of the leading blocks the pool has in all namespaces; None where nobody knows.

        What the event loop itself asks for is sent at once, and not only when the caller begins to wait for the answer.
        """
        if self._shared is None or tenant not in self._tenants or not keys or not namespaces:
            return _nobody_knows()
        rest = list(namespaces)
        return self._counted(tenant, keys, rest, self._ask_on_loop(tenant, keys, rest[0]))

    def close(self) -> None:
        """Ends connections. Waits for lookups under way, each up to `pool.call_timeout_s`."""
        self._stack.close()

    async def _counted(
        self, tenant: str, keys: Sequence[BlockKey], namespaces: list[NamespaceId], sent: _Sent
    ) -> int | None:
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await self._num_leading(tenant, keys, namespaces, sent)
        except TimeoutError:
            self._lookups.labels("late").inc()
            return None
        except _NotAskedError:
            self._lookups.labels("not_asked").inc()
            return None
        except KvtierError:
            found = None
        self._lookups.labels("answered" if found is not None else "failed").inc()
        return found

    async def _num_leading(
        self, tenant: str, keys: Sequence[BlockKey], namespaces: list[NamespaceId], sent: _Sent
    ) -> int | None:
        """Asks for one namespace after the other, as far as all before have the blocks: by the loop as long as it can,
        in a thread for the rest.

        :param sent: the loop's question for the first namespace.
        """
        num_leading = len(keys)
        while sent is not None and (statuses := await sent) is not None:
            num_leading = _num_hits(statuses)
            del namespaces[0]
            if not namespaces or not num_leading:
                return num_leading
            sent = self._ask_on_loop(tenant, keys[:num_leading], namespaces[0])
        found = await self._in_thread(tenant, keys[:num_leading], namespaces)
        on_loop = self._on_loop.get(tenant)
        if on_loop is not None and found is not None and len(keys) <= MOST_KEYS:
            on_loop.open()
        return found

    def _ask_on_loop(self, tenant: str, keys: Sequence[BlockKey], namespace: NamespaceId) -> _Sent:
        """None: a thread has to ask."""
        on_loop = self._on_loop.get(tenant)
        if on_loop is None:
            return None
        on_loop.end_if_late()
        return on_loop.ask(keys, namespace) if on_loop.has_room(len(keys)) else None

    async def _in_thread(self, tenant: str, keys: Sequence[BlockKey], namespaces: Sequence[NamespaceId]) -> int | None:
        if self._num_pending >= _MOST_PENDING:
            raise _NotAskedError
        self._num_pending += 1
        asked = asyncio.get_running_loop().run_in_executor(self._threads, self._ask, tenant, keys, namespaces)
        asked.add_done_callback(self._done)
        return await asyncio.shield(asked)

    def _ask(self, tenant: str, keys: Sequence[BlockKey], namespaces: Sequence[NamespaceId]) -> int | None:
        assert self._shared is not None
        num_leading, whose = len(keys), tenant_id(tenant)
        may_be_left_alone = self._shared.is_left_alone(whose)
        for namespace in namespaces:
            num_leading = _num_hits(self._shared.tier.lookup(rank_keys(keys[:num_leading], namespace)))
        may_be_left_alone = may_be_left_alone or self._shared.is_left_alone(whose)
        return None if not num_leading and may_be_left_alone else num_leading

    def _done(self, asked: "asyncio.Future[int | None]") -> None:
        self._num_pending -= 1
        if not asked.cancelled():
            asked.exception()  # it is told to whoever waits for it, and to nobody if nobody does


async def _nobody_knows() -> None:
    """The answer where nobody can be asked."""


class _NotAskedError(Exception):
    """Too many lookups wait for a thread."""


def _num_hits(statuses: Sequence[Status]) -> int:
    """The number of hits before the first miss."""
    return next((i for i, status in enumerate(statuses) if status is not Status.HIT), len(statuses))


def _executor(stack: contextlib.ExitStack, num_threads: int, name: str) -> ThreadPoolExecutor:
    """Threads that `stack` waits for. What has not begun by then is cancelled."""
    threads = started_threads(num_threads, name)
    stack.callback(threads.shutdown, cancel_futures=True)
    return threads
