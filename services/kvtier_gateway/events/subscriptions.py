"""A subscription for each engine whose events are configured, for as long as the engine is named."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtier_gateway.engines.engine import Engine
from kvtier_gateway.events.block_names import BlockNames, OwnNames, VllmNames
from kvtier_gateway.events.subscription import Subscription
from kvtier_gateway.keying.tenants import TenantHashers
from kvtier_gateway.routing.values import EngineId, KvEvent

_LOOK_S = 0.5


class EventCounts(Collector):
    """What was heard of engines' KV events."""

    def __init__(self, registry: CollectorRegistry, counts: Callable[[], tuple[int, int]]) -> None:
        """Registers itself.

        :param counts: batches that were heard, and gaps that could not be closed.
        """
        self._counts = counts
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """prometheus_client's."""
        texts = {
            "kvtier_gateway_event_batches": "Batches of KV events that were heard from the engines that there are",
            "kvtier_gateway_event_gaps": "Gaps that could not be closed: what such an engine holds is forgotten",
        }
        for (name, text), count in zip(texts.items(), self._counts(), strict=True):
            yield GaugeMetricFamily(name, text, value=count)


class Subscriptions:
    """Feeds a strategy. Event loop only."""

    def __init__(
        self,
        engines: Callable[[], Sequence[Engine]],
        hashers: TenantHashers,
        on_event: Callable[[EngineId, KvEvent], None],
    ) -> None:
        """Listens to nothing yet. Needs pyzmq as soon as an engine has an endpoint."""
        self._engines, self._hashers, self._on_event = engines, hashers, on_event
        self._context: Any = None
        self._running: dict[Engine, tuple[Subscription, asyncio.Task[None]]] = {}

    async def run(self) -> None:
        """Keeps the subscriptions until it is cancelled, and ends them then."""
        try:
            while True:
                self._keep()
                await asyncio.sleep(_LOOK_S)
        finally:
            for _, task in self._running.values():
                task.cancel()
            for _, task in self._running.values():
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            if self._context is not None:
                self._context.destroy(linger=0)

    def counts(self) -> tuple[int, int]:
        """Batches that were heard, and gaps that could not be closed, of the engines that there are."""
        heard = [subscription for subscription, _ in self._running.values()]
        return sum(each.num_batches for each in heard), sum(each.num_gaps for each in heard)

    def _keep(self) -> None:
        # Before an engine was up nobody knows how it names its blocks.
        wanted = [each for each in self._engines() if each.config.events is not None and each.is_vllm is not None]
        for engine in [engine for engine in self._running if engine not in wanted]:
            self._running.pop(engine)[1].cancel()
        for engine in wanted:
            if engine not in self._running:
                subscription = self._subscribed(engine)
                self._running[engine] = subscription, asyncio.create_task(subscription.run())

    def _subscribed(self, engine: Engine) -> Subscription:
        import zmq.asyncio

        if self._context is None:
            self._context = zmq.asyncio.Context()
        name = EngineId(engine.url)
        host = urlsplit(engine.url).hostname or ""
        host = f"[{host}]" if ":" in host else host
        endpoint, replay = engine.config.events, engine.config.events_replay
        assert endpoint is not None
        return Subscription(
            self._context,
            endpoint.replace("{host}", host),
            None if replay is None else replay.replace("{host}", host),
            self._names_of(engine),
            lambda event: self._on_event(name, event),
        )

    def _names_of(self, engine: Engine) -> BlockNames:
        if not engine.is_vllm:
            return OwnNames()
        tenants = self._hashers.tenants if engine.config.tenants is None else engine.config.tenants
        return VllmNames(self._hashers.of, tenants[0] if len(tenants) == 1 else None)
