"""A whole gateway in one object: keys, engines, both ports; what `kvtier gateway serve` runs."""

import asyncio
import contextlib
import logging
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from prometheus_client import CollectorRegistry

from kvtier.clock import MONOTONIC
from kvtier.config import Config
from kvtier.config.accepted import gateway_files
from kvtier.config.tls_files import gateway_engine_tls, gateway_tls
from kvtier.errors import ConfigError
from kvtier.net.address import reason_of
from kvtier.net.serving_tls import serving_context
from kvtier.net.tls_listener import TlsListener
from kvtier.system.process_metrics import describe_process
from kvtier_gateway.api import Api
from kvtier_gateway.dispatching import Dispatching
from kvtier_gateway.engines.fleet import Fleet
from kvtier_gateway.engines.gauges import EngineGauges
from kvtier_gateway.engines.session import EngineSession
from kvtier_gateway.events.subscriptions import EventCounts, Subscriptions
from kvtier_gateway.forwarding import Forwarding
from kvtier_gateway.http.connections import BACKLOG, BoundedServer, Handler
from kvtier_gateway.http.stalls import Stalls
from kvtier_gateway.keying.pool import PoolLookup
from kvtier_gateway.keying.prompts import Prompts
from kvtier_gateway.keying.tenants import TenantHashers
from kvtier_gateway.keying.tokenising import PromptTokens
from kvtier_gateway.keys import ApiKeys
from kvtier_gateway.metrics import GatewayMetrics
from kvtier_gateway.protection import most_connections, require_usable, shows_tenants, start_attempts
from kvtier_gateway.routing.registry import make_strategy
from kvtier_gateway.status import Status

_STATUS_CONNECTIONS = 64
_READ_AHEAD_BYTES = 1 << 15
"""What is read ahead of an engine's answer for a client that is slow."""
_KEEP_ALIVE_S = 2.0
"""How long connections to engines are kept: shorter than engines do, or a request would meet one that is closing."""
_END_S = 0.2
"""How long connections are waited for that are ended. aiohttp takes 0 for no bound."""
_LAST_ANSWERS_S = 0.5
"""What clients whose requests are cut get to hear so."""
_LOOK_S = 0.05
"""Seconds between two looks whether the last request has ended."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Addresses:
    """The places at which the gateway listens, with real ports."""

    url: str
    status: str


class GatewayService:
    """Start, serve, stop; once each. Event loop only."""

    name = "gateway"
    what = "keys and engines"

    def __init__(self, config: Config) -> None:
        """Opens and reads nothing yet: see `start`."""
        self._config = config
        self._stack = contextlib.AsyncExitStack()
        self._listener: asyncio.Server | TlsListener | None = None
        """None until clients are served."""

    async def start(self) -> Addresses:
        """Listens, looks at each engine once, serves.

        :raises ConfigError: no client could be let in, or others could read what they send; there is no engine; files
            or secrets are no good; an address cannot be had.
        """
        config, table = self._config, self._config.gateway
        for attempt in start_attempts(config):
            attempt()
        self._keys = ApiKeys(config)
        secret = config.references.secret
        token = None if table.engine_token is None else secret("gateway.engine_token", table.engine_token)
        listening = _listening("listen", table.listen)
        self._stack.callback(listening.close)
        status_listening = _listening("status_listen", table.status_listen)
        self._stack.callback(status_listening.close)
        registry = CollectorRegistry()
        describe_process(registry)
        metrics = GatewayMetrics(registry)
        hashers = TenantHashers(config)
        prompts = self._prompts(hashers, metrics)
        over = await self._stack.enter_async_context(self._session())
        session = EngineSession(over, gateway_engine_tls(config), table.probe_interval_s)
        self._stack.callback(session.close)
        self._fleet = Fleet(session, table, metrics)
        EngineGauges(registry, lambda: self._fleet.engines)
        self._stack.push_async_callback(self._fleet.stop)
        await self._fleet.start()
        stalls = Stalls(table.send_timeout_s, metrics)
        watching = asyncio.create_task(stalls.run())
        self._stack.push_async_callback(_cancelled, watching)
        self._forwarding = Forwarding(session, table, metrics, stalls, token)
        strategy = make_strategy(table.strategy)
        dispatching = Dispatching(strategy, self._fleet, metrics)
        if strategy.follows_events:
            listening_to = Subscriptions(lambda: self._fleet.engines, hashers, strategy.kv_event)
            EventCounts(registry, listening_to.counts)
            self._stack.push_async_callback(_cancelled, asyncio.create_task(listening_to.run()))
        self._api = Api(table, self._keys, self._fleet, prompts, dispatching, self._forwarding, stalls, metrics)
        status = Status(registry, self._fleet, self._api.health, shows_tenants=shows_tenants(table))
        await self._serve(status_listening, status.answer, _STATUS_CONNECTIONS, None)
        files = gateway_tls(config)
        context = None if files is None else serving_context(files)
        self._server, self._listener = await self._serve(listening, self._api.answer, most_connections(table), context)
        scheme = "http" if files is None else "https"
        return Addresses(f"{scheme}://{_address(listening)}", f"http://{_address(status_listening)}")

    def _prompts(self, hashers: TenantHashers, metrics: GatewayMetrics) -> Prompts:
        config, table = self._config, self._config.gateway
        pool = PoolLookup(config, metrics, table.pool_lookup_timeout_s)
        self._stack.callback(pool.close)
        tokens = None
        if table.tokenizer is not None:
            try:
                tokens = PromptTokens(config.references.path(table.tokenizer), int(table.tokens_bytes))
            except ConfigError as error:
                raise config.references.error_about("gateway.tokenizer", str(error)) from error
        prompts = Prompts(tokens, hashers, pool)
        self._stack.callback(prompts.close)
        return prompts

    def files(self, config: Config) -> list[Path]:
        """Returns the files that say whom the gateway lets in and which engines there are."""
        return gateway_files(config)

    def take(self, config: Config) -> None:
        """Lets in those who have keys in this configuration, and sends requests to its engines, from now on. The rest
        of it changes nothing. Raises `ConfigError`, and changes nothing, for keys that cannot be, and without any key
        or engine."""
        require_usable(config)
        self._keys.set(config)
        self._fleet.set(config.gateway)

    def note(self, event: str, **fields: str) -> None:
        """Tells the log of an event, and nobody else."""

    async def stop(self) -> None:
        """Takes no new requests, lets those that are running finish within the grace, cuts the rest, closes. Also after
        a start that has failed."""
        if self._listener is not None:
            await self._finish(self._listener)
        await self._stack.aclose()

    async def _finish(self, listener: asyncio.Server | TlsListener) -> None:
        self._api.is_stopping = True
        await _closed(listener)
        self._server.cut_idle()
        deadline = MONOTONIC() + self._config.gateway.shutdown_grace_s
        while self._server.num_busy and MONOTONIC() < deadline:
            await asyncio.sleep(_LOOK_S)
            self._server.cut_idle()
        if self._server.num_busy:
            _log.warning("%d requests are cut: they have not ended in shutdown_grace_s", self._server.num_busy)
            self._forwarding.is_stopping = True
            for engine in self._fleet.all_engines():
                engine.give_up()
            await asyncio.sleep(_LAST_ANSWERS_S)

    def _session(self) -> aiohttp.ClientSession:
        """What requests to engines go over. Their number is bounded by that of clients."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S, ttl_dns_cache=10),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._config.gateway.connect_timeout_s),
            read_bufsize=_READ_AHEAD_BYTES,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )

    async def _serve(
        self, listening: socket.socket, handler: Handler, max_connections: int, context: ssl.SSLContext | None
    ) -> tuple[BoundedServer, asyncio.Server | TlsListener]:
        server = BoundedServer(handler, max_connections)
        self._stack.push_async_callback(server.shutdown, _END_S)
        listener: asyncio.Server | TlsListener
        if context is None:
            listener = await asyncio.get_running_loop().create_server(server, sock=listening, backlog=BACKLOG)
        else:
            listener = TlsListener(listening, context, server)
        self._stack.push_async_callback(_closed, listener)
        return server, listener


def _listening(key: str, address: str) -> socket.socket:
    host, port = _host_port(address)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"gateway.{key}: cannot listen on {address}: {reason_of(error)}; choose another address"
        ) from error


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _closed(listener: asyncio.Server | TlsListener) -> None:
    closing = listener.close()
    if closing is not None:
        await closing


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
