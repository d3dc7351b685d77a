"""What Prometheus, probes and operators ask for, on a port of its own."""

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic_core import to_json

from kvtier_gateway.engines.fleet import Fleet
from kvtier_gateway.engines.gauges import described


class Status:
    """Answers `/metrics`, `/healthz` and `/engines`. Event loop only."""

    def __init__(self, registry: CollectorRegistry, fleet: Fleet, health: Callable[[], web.Response]) -> None:
        self._registry, self._fleet, self._health = registry, fleet, health

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers one request; HEAD as GET, without the text."""
        path = request.raw_path.partition("?")[0] if request.method in {"GET", "HEAD"} else None
        if path == "/metrics":
            return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
        if path == "/healthz":
            return self._health()
        if path == "/engines":
            listed = [described(engine) for engine in self._fleet.engines]
            return web.Response(body=to_json({"engines": listed}), content_type="application/json")
        return web.Response(status=404, text="try /healthz, /metrics or /engines\n")
