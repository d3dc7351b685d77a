"""Which server has which keys: one has all, or a Cluster's map says, found out anew when it has changed. Probes of
servers that are left alone."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import redis
from redis.cluster import ClusterNode, NodesManager
from redis.crc import key_slot

from kvtier.clock import MONOTONIC
from kvtier.errors import KvtierError, UnavailableError
from kvtier.system.started_threads import started_threads
from kvtier.tiers.common.health import Health
from kvtier.tiers.redis.address import Kind, RedisAddress
from kvtier.tiers.redis.clients import FAILURES, RedisClients
from kvtier.tiers.redis.exchange import Conversation, Exchange

T = TypeVar("T")
_MAX_CALLS = 16
"""Calls that one server answers at a time; more wait for their turn."""


@dataclass(frozen=True, slots=True, eq=False)
class Server:
    """One server that has keys. Its threads are its own, so that one that hangs keeps nobody else waiting."""

    name: str
    """Its host and port, or where its Sentinels are."""
    client: redis.Redis
    health: Health
    in_cluster: bool
    threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_MAX_CALLS, thread_name_prefix="kvtier-redis")
    )

    def ask(self, work: Callable[[Conversation], T]) -> Exchange[T]:
        """Begins an exchange."""
        return Exchange(self.threads, self.client.connection_pool, work, self.in_cluster)

    def close(self) -> None:
        """Closes its connections and lets its threads end. Idempotent."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.client.connection_pool.disconnect()


class Topology:
    """The servers behind one address. Any thread. Connects to nobody before it is asked."""

    def __init__(
        self,
        address: RedisAddress,
        clients: RedisClients,
        health: Callable[[str, Callable[[], None]], Health],
        probe_timeout_s: float,
    ) -> None:
        """
        :param health: makes the record of a server of this name, which is probed so.
        :param probe_timeout_s: seconds that a server that is left alone has for a sign of life.
        """
        self._clients = clients
        self._make_health = health
        self._probe_timeout_s = probe_timeout_s
        is_cluster = address.kind is Kind.CLUSTER
        self.discovery = health(str(address), self._probe_map if is_cluster else self._probe_single)
        """Health of the search for a Cluster's map; else that of the one server."""
        self._lock = threading.Lock()
        self._single: Server | None = None
        if not is_cluster:
            self._single = Server(str(address), clients.single(), self.discovery, in_cluster=False)
        self._map: NodesManager | None = None
        """None until it was found out. Guarded by _lock."""
        self._search: Future[None] | None = None
        """The latest search for the Cluster's map; None before the first one. Guarded by _lock."""
        self._scouts = started_threads(1, "kvtier-redis-map")
        self._servers: dict[str, Server] = {}
        """The servers of a Cluster that were needed so far and are in its map, by host and port. Guarded by _lock."""

    @property
    def is_known(self) -> bool:
        """Whether `owners` and `servers` can answer at once."""
        return self._single is not None or self._map is not None

    def owners(self, names: Sequence[bytes], deadline: float) -> list[Server | None]:
        """The server of each key; None where the Cluster has none. Blocks only while the map is not known.

        Raises `TimeoutError`, or one of `FAILURES` when no seed answers.
        """
        if self._single is not None:
            return [self._single] * len(names)
        slots = self._known(deadline).slots_cache
        owners = [slots.get(key_slot(name)) for name in names]
        return [self._server(nodes[0]) if nodes else None for nodes in owners]

    def servers(self, deadline: float) -> list[Server]:
        """All that may be written to. Blocks and raises as `owners` does."""
        if self._single is not None:
            return [self._single]
        return [self._server(node) for node in self._known(deadline).get_nodes_by_server_type("primary")]

    def num_left_alone(self) -> int:
        """How many servers of those that were asked so far are left alone because they failed. Never waits; a Cluster
        of which no seed answers counts as one."""
        with self._lock:
            found = [server.health for server in self._servers.values()]
        return sum(health.is_left_alone for health in [self.discovery, *found])

    def renew(self) -> Future[None]:
        """Has the map found out anew in the background, unless that is under way."""
        with self._lock:
            if self._search is None or self._search.done():
                self._search = self._scouts.submit(self._find)
            return self._search

    def renewed(self, deadline: float) -> None:
        """`renew`, and waits for it until the deadline (monotonic), whatever comes of it."""
        wait([self.renew()], timeout=max(0.0, deadline - MONOTONIC()))

    def close(self) -> None:
        """Closes all connections, and ends all probes. No exchange of a caller may be in flight."""
        with self._lock:
            servers = [*self._servers.values(), *([self._single] if self._single is not None else [])]
            found = self._map
        for health in (self.discovery, *(server.health for server in servers)):
            health.close()
        self._scouts.shutdown(wait=False, cancel_futures=True)
        for server in servers:
            server.close()
        if found is not None:
            found.close()

    def _known(self, deadline: float) -> NodesManager:
        with self._lock:
            found = self._map
        if found is None:
            search = self.renew()
            wait([search], timeout=max(0.0, deadline - MONOTONIC()))
            if not search.done():
                raise TimeoutError("no node of the Cluster answered in time")
            search.result()
            with self._lock:
                found = self._map
            assert found is not None, "found without an exception"
        return found

    def _find(self) -> None:
        with self._lock:
            known = self._map
        try:
            if known is not None:
                known.initialize()  # asks the nodes that it knows
            else:
                known = self._clients.cluster()
        except LookupError as error:  # redis-py takes the first primary of a map that has none
            known = None
            raise UnavailableError("the Redis Cluster serves no hash slot yet: create it first") from error
        except BaseException:
            known = None  # none of them answers: the seeds are asked next
            raise
        else:
            self.discovery.worked()
        finally:
            with self._lock:
                self._map = known
                if known is not None:
                    # Calls may be under way to a server that left, so it is not closed: it goes with the last of them.
                    serving = {node.name for node in known.get_nodes_by_server_type("primary")}
                    for name in self._servers.keys() - serving:
                        self._servers.pop(name).health.forget()

    def _server(self, node: ClusterNode) -> Server:
        with self._lock:
            server = self._servers.get(node.name)
            if server is None or server.client is not node.redis_connection:
                probe = partial(self._probe_node, node.name)
                health = server.health if server is not None else self._make_health(node.name, probe)
                server = self._servers[node.name] = Server(node.name, node.redis_connection, health, in_cluster=True)
            return server

    def _probe_map(self) -> None:
        """Raises a `KvtierError` unless the Cluster's map is known."""
        try:
            self._known(MONOTONIC() + self._probe_timeout_s)
        except FAILURES as error:
            raise self._clients.translated(error) from None

    def _probe_single(self) -> None:
        assert self._single is not None, "it fails before it is probed"
        self._probe(self._single)

    def _probe_node(self, name: str) -> None:
        with self._lock:
            server = self._servers.get(name)
        if server is None:  # it has left the map meanwhile
            return
        try:
            self._probe(server)
        except KvtierError:
            self.renew()  # another one may have its keys by now
            raise

    def _probe(self, server: Server) -> None:
        """Raises a `KvtierError` unless the server answers."""
        try:
            server.ask(_ping).result(MONOTONIC() + self._probe_timeout_s)
        except FAILURES as error:
            raise self._clients.translated(error) from None


def _ping(talk: Conversation) -> None:
    talk.ask([("PING",)], lambda i, answer: None)
