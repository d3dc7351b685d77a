"""What `/metrics` and `/engines` say of the engines at the moment."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtier_gateway.engines.engine import Engine

_GAUGES: Mapping[str, tuple[str, Callable[[Engine], float]]] = {
    "kvtier_gateway_engine_up": ("Whether an engine gets requests, by its last answers", lambda engine: engine.is_up),
    "kvtier_gateway_engine_draining": (
        "Whether an engine gets no new requests because an operator wants it",
        lambda engine: engine.config.draining,
    ),
    "kvtier_gateway_engine_fenced": (
        "Whether an engine gets no requests because it does not show that it keeps tenants apart",
        lambda engine: engine.is_fenced,
    ),
    "kvtier_gateway_running": ("Requests that an engine has from this gateway", lambda engine: len(engine.attempts)),
    "kvtier_gateway_engine_running": ("Requests in an engine's batch, as it says", lambda e: e.loads.num_running),
    "kvtier_gateway_engine_waiting": ("Requests that wait in an engine, as it says", lambda e: e.loads.num_waiting),
}


class EngineGauges(Collector):
    """Gauges of the engines that there are."""

    def __init__(self, registry: CollectorRegistry, engines: Callable[[], Sequence[Engine]]) -> None:
        """Registers itself."""
        self._engines = engines
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """prometheus_client's."""
        for name, (text, value) in _GAUGES.items():
            family = GaugeMetricFamily(name, text, labels=["engine"])
            for engine in self._engines():
                family.add_metric([engine.url], value(engine))
            yield family


def described(engine: Engine, *, shows_tenants: bool) -> dict[str, Any]:
    """An engine for an operator, as JSON."""
    tenants = {"tenants": engine.config.tenants} if shows_tenants else {}
    return {
        "url": engine.url,
        "up": engine.is_up,
        "draining": engine.config.draining,
        "fenced": engine.is_fenced,
        "problem": engine.problem,
        "running": len(engine.attempts),
        "models": sorted(engine.models) if engine.models is not None else None,
    } | tenants
