"""What Prometheus, probes and operators ask for, on a port of its own."""

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from pydantic_core import to_json

from kvtier.system.metric_totals import Totals
from kvtier_gateway.engines.fleet import Fleet
from kvtier_gateway.engines.gauges import described


class Status:
    """Answers `/metrics`, `/healthz` and `/engines`. Event loop only."""

    def __init__(
        self, registry: Collector, fleet: Fleet, health: Callable[[], web.Response], *, shows_tenants: bool
    ) -> None:
        """:param shows_tenants: whether `/metrics` has series of single tenants and API keys, and not only totals, and
        `/engines` says which tenants an engine serves."""
        self._metrics = registry if shows_tenants else Totals(registry, ("tenant", "key"))
        self._fleet, self._health, self._shows_tenants = fleet, health, shows_tenants

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers one request; HEAD as GET, without the text."""
        path = request.raw_path.partition("?")[0] if request.method in {"GET", "HEAD"} else None
        if path == "/metrics":
            return web.Response(body=generate_latest(self._metrics), headers={"Content-Type": CONTENT_TYPE_LATEST})
        if path == "/healthz":
            return self._health()
        if path == "/engines":
            listed = [described(engine, shows_tenants=self._shows_tenants) for engine in self._fleet.engines]
            return web.Response(body=to_json({"engines": listed}), content_type="application/json")
        return web.Response(status=404, text="try /healthz, /metrics or /engines\n")
