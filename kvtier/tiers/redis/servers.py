"""Asks the servers of a Redis, all that have some of the keys at once, and keeps the failure of one to its own keys."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import TypeVar

from kvtier.clock import MONOTONIC
from kvtier.tiers.redis.clients import FAILURES, RedisClients
from kvtier.tiers.redis.exchange import Conversation
from kvtier.tiers.redis.topology import Server, Topology

T = TypeVar("T")
Work = Callable[[Conversation, list[int]], list[int]]
"""Does what is to be done for the keys at these places, which one server has; gives the places that have moved."""
_NUM_TRIES = 2
"""The number of tries: with the map as it was known, and with a fresh one after a key was found to have moved."""
_MAX_BATCH_KEYS = 4096


class Servers:
    """Exchanges with all servers behind an address. Any thread; blocks up to the deadline; raises nothing for failures.

    A server that fails is counted and its keys are not answered for. It is not retried.
    """

    def __init__(self, topology: Topology, clients: RedisClients, max_batch_bytes: int) -> None:
        """:param max_batch_bytes: payload bytes that one server is asked for, or sent, at a time."""
        self._topology = topology
        self._clients = clients
        self._max_batch_bytes = max_batch_bytes
        self.have_answered = False
        """Whether any of them ever has. Written by any thread, never back."""

    def each(self, op: str, names: Sequence[bytes], sizes: Sequence[int], work: Work, deadline: float) -> int:
        """Has `work` done for all names, each server's in bounded batches one after the other, in order.

        `work` runs on threads of the servers; what it collects holds even where it fails later.

        :param sizes: payload bytes of each.
        :param deadline: monotonic.
        :return: how many keys nobody answered for because a Cluster was moving them.
        """
        places: Sequence[int] = range(len(names))
        for remaining_tries in reversed(range(_NUM_TRIES)):
            groups, moved = self._grouped(op, names, places, deadline)
            jobs = [(server, partial(self._in_batches, work, own, sizes)) for server, own in groups.items()]
            for answered in self._run(op, jobs, deadline):
                moved += answered
            if not moved:
                break
            places = sorted(moved)
            if remaining_tries:
                self._topology.renewed(deadline)
        return len(moved)

    def all(self, op: str, work: Callable[[Conversation], object], deadline: float) -> bool:
        """Has `work` done at every server. Whether all have answered."""
        servers = self._looked_up(op, lambda: self._topology.servers(deadline))
        if servers is None:
            return False
        return len(self._run(op, [(server, work) for server in servers], deadline)) == len(servers)

    def _looked_up(self, op: str, look: Callable[[], T]) -> T | None:
        """What the topology says; None where it has to be found out first and is not."""
        with ExitStack() as asking:
            if not self._topology.is_known and not asking.enter_context(self._topology.discovery.asking(op)):
                return None
            try:
                return look()
            except FAILURES as error:
                self._topology.discovery.failed(op, self._clients.translated(error))
                return None

    def _grouped(
        self, op: str, names: Sequence[bytes], places: Sequence[int], deadline: float
    ) -> tuple[dict[Server, list[int]], list[int]]:
        """The places by the server to ask, each in order; and those that no server has."""
        groups: dict[Server, list[int]] = {}
        orphans: list[int] = []
        if not places:
            return groups, orphans
        owners = self._looked_up(op, lambda: self._topology.owners([names[place] for place in places], deadline))
        if owners is None:
            return groups, orphans
        for place, owner in zip(places, owners, strict=True):
            (orphans if owner is None else groups.setdefault(owner, [])).append(place)
        return groups, orphans

    def _run(self, op: str, jobs: Sequence[tuple[Server, Callable[[Conversation], T]]], deadline: float) -> list[T]:
        """What those servers give that answer in time."""
        if MONOTONIC() >= deadline:  # no server is to blame but the one that was late, which was counted
            return []
        answers: list[T] = []
        with ExitStack() as running:  # whatever is raised, nobody uses the caller's memory afterwards
            exchanges = [
                (server, running.enter_context(closing(server.ask(work))))
                for server, work in jobs
                if running.enter_context(server.health.asking(op))
            ]
            for server, exchange in exchanges:
                try:
                    answers.append(exchange.result(deadline))
                except FAILURES as error:
                    server.health.failed(op, self._clients.translated(error))
                    if server.in_cluster:
                        self._topology.renew()
                else:
                    server.health.worked()
                    self.have_answered = True
        return answers

    def _in_batches(self, work: Work, places: list[int], sizes: Sequence[int], talk: Conversation) -> list[int]:
        return [place for batch in self._batches(places, sizes) for place in work(talk, batch)]

    def _batches(self, places: list[int], sizes: Sequence[int]) -> Iterator[list[int]]:
        batch: list[int] = []
        nbytes = 0
        for place in places:
            if batch and (nbytes + sizes[place] > self._max_batch_bytes or len(batch) == _MAX_BATCH_KEYS):
                yield batch
                batch, nbytes = [], 0
            batch.append(place)
            nbytes += sizes[place]
        if batch:
            yield batch
