"""The redis tier: blocks in a Redis or Valkey that the pools of a site share. What fails there is a miss here.

A block lies at `kvt1:TENANT:NAMESPACE:HASH`, as a string: header and payload of its stored form. A string, not a
hash of two fields: SET knows NX and a time to live, and a block is never half of one and half of another. A payload, as
stored, of more than `max_value_bytes` lies in parts: the first behind the header, the others at names that
`commands.part_names` gives. The first part is written last: where it is, the block is whole, until the server evicts
one of the others; then the block is a miss and what is left is dropped.

redis-py connects, logs in, speaks to servers and finds them (decision 24); 2 MiB blocks move about as fast as through
a pipeline of its own. A server whose allocator rounds up as jemalloc does counts 2.5 MiB of `maxmemory` for such a
block.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kvtier.clock import MONOTONIC
from kvtier.errors import KvtierError, UnavailableError
from kvtier.identity.keys import StoreKey, TenantId
from kvtier.memory.buffers import ReadableBuffer
from kvtier.metrics import Metrics
from kvtier.system.quiet_log import QuietLog
from kvtier.tiers.base import Item, Status, Usage, WriteStatus, require_pairs
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.common.call_guard import CallGuard
from kvtier.tiers.common.health import Health
from kvtier.tiers.common.packer import BlockPacker
from kvtier.tiers.redis.address import RedisAddress
from kvtier.tiers.redis.blocks import BlockFormat
from kvtier.tiers.redis.caps import TenantCaps
from kvtier.tiers.redis.clients import RedisClients
from kvtier.tiers.redis.commands import key_names
from kvtier.tiers.redis.discards import Discards
from kvtier.tiers.redis.exchange import Conversation, takes_no_writes
from kvtier.tiers.redis.memory import REPORT, ServerMemory, total
from kvtier.tiers.redis.presence import presence
from kvtier.tiers.redis.purge import TenantPurge
from kvtier.tiers.redis.reader import BlockReader
from kvtier.tiers.redis.servers import Servers, Work
from kvtier.tiers.redis.settings import RedisSettings
from kvtier.tiers.redis.topology import Topology
from kvtier.tiers.redis.undone import UndoneDiscards
from kvtier.tiers.redis.writer import BlockWriter

_log = logging.getLogger(__name__)

_DISCARDS_AT_ONCE = 1024
_THERE = (WriteStatus.STORED, WriteStatus.EXISTS)


class RedisTier:
    """`Tier` over Redis 6.2 or later, or Valkey: one server, Sentinel or Cluster. Serves all tenants. `RedisSettings`
    says what its deadlines and sizes are.

    No call takes longer than `call_timeout_s`, however many batches it is split into; what did not come in
    time is MISS or FAILED. After some failures in a row a server is left alone: its keys are answered MISS and
    FAILED at once, until it answers probes, for which no call waits; other nodes of a Cluster go on. Failures are
    counted in `io_errors` by exception (`BreakerOpen` for servers not asked, `Moved` for values that a Cluster was
    moving, `ReadOnly` for blocks that a server refused which can be read), and logged when a server's breaker opens
    and closes.
    Every block is verified against the key asked for; what does not hold is a MISS, is counted in
    `corrupt_blocks` and dropped there.

    The server forgets as it is told: by `ttl_s`, and by `maxmemory` and `maxmemory-policy`. A server that would
    refuse writes instead, or grow without bound, is warned of once. FULL is what it answers when it refuses.

    Any thread. Blocks up to the deadline.
    """

    def __init__(
        self,
        url: str,
        settings: RedisSettings,
        *,
        metrics: Metrics,
        breaker: CircuitBreaker,
        name: str = "redis",
    ) -> None:
        """Connects to nobody yet.

        :param url: see `address`. Raises `ConfigError` when it cannot be one.
        :param breaker: settings of the breakers, of which each server has one.
        """
        self._address = RedisAddress.parse(url)
        self._clients = RedisClients(self._address, settings)

        def health(server: str, probe: Callable[[], None]) -> Health:
            return Health(name, server=server, metrics=metrics, breaker=breaker.another(), log=_log, probe=probe)

        self._topology = Topology(self._address, self._clients, health, settings.call_timeout_s)
        self._servers = Servers(self._topology, self._clients, settings.max_batch_bytes)
        self._form = BlockFormat(
            BlockPacker(settings.codec, tier=name, metrics=metrics, seals=settings.seals),
            ttl_ms=max(1, round(settings.ttl_s * 1000)) if settings.ttl_s else 0,
            max_value_bytes=settings.max_value_bytes,
        )
        self._metrics = metrics
        self._call_timeout_s = settings.call_timeout_s
        self._lookup_timeout_s = min(settings.lookup_timeout_s, settings.call_timeout_s)
        self._name = name
        self._undone = UndoneDiscards()
        self._caps = TenantCaps(self._servers, settings.max_value_bytes, self._evict, self._note_no_books)
        self._evicted = metrics.evicted_blocks.labels(name)
        self._guard = CallGuard(f"tier {name}")
        self._dropped, self._refused = QuietLog(_log), QuietLog(_log)
        self._lock = threading.Lock()
        self._policy_seen = False
        """Whether the server was asked how it evicts. Guarded by _lock."""
        self._takes_writes = True
        """False: a server has refused to write, and none has written since. Any thread: it is for the log."""

    @property
    def name(self) -> str:
        return self._name

    def problem(self) -> str | None:
        """Says that servers are left alone; None when none is. Never waits, and asks nobody: a server that is well
        again counts as left alone until there is something to ask it for."""
        num = self._topology.num_left_alone()
        if not num:
            return None
        servers = "a server is" if num == 1 else f"{num} servers are"
        return f"{self._name}: {servers} left alone after a failure: blocks there miss, and the log says which and why"

    def lookup(self, keys: Sequence[StoreKey]) -> list[Status]:
        """Answers HIT for each key whose block its server has, and MISS for all others and for servers that do not
        answer."""
        statuses = [Status.MISS] * len(keys)
        names = key_names(keys)

        def work(talk: Conversation, places: list[int]) -> list[int]:
            found = presence(talk, [names[place] for place in places])
            for i in found.there:
                statuses[places[i]] = Status.HIT
            return [places[i] for i in found.moved]

        with self._guard:
            deadline = MONOTONIC() + self._lookup_timeout_s
            self._each("lookup", names, [0] * len(keys), work, deadline)
        return self._without_discarded(keys, statuses)

    def read(self, keys: Sequence[StoreKey], into: Sequence[memoryview]) -> list[Status]:
        """Reads blocks; a status per key, in order. Each payload is copied or unpacked from redis-py's answer to
        `into`."""
        require_pairs(keys, into)
        statuses = [Status.MISS] * len(keys)
        reader = BlockReader(keys, key_names(keys), into, self._form)
        with self._guard:
            deadline = MONOTONIC() + self._call_timeout_s
            self._each("read", reader.names, [len(buffer) for buffer in into], reader.read_firsts, deadline)
            self._count_blocks("read", "Moved", reader.read_parts(self._servers, deadline))
            self._unlink("read", reader.to_drop, deadline)
        for place in reader.hits:
            statuses[place] = Status.HIT
        self._caps.note_reads([keys[place] for place in reader.hits])
        for reason in reader.corrupt:
            self._metrics.corrupt_blocks.labels(self._name).inc()
            self._dropped.warning(f"tier {self._name}: block dropped: {reason}")
        return self._without_discarded(keys, statuses)

    def write(self, items: Sequence[Item[ReadableBuffer]]) -> list[WriteStatus]:
        """Stores payloads; a status per block, in order. FAILED also when the server stored the block and its answer
        was lost. FULL also where its tenant's cap leaves no room for it."""
        keys = [key for key, _, _ in items]
        with self._guard:
            deadline = MONOTONIC() + self._call_timeout_s
            kept_out = self._caps.make_room(keys, [len(payload) for _, payload, _ in items], deadline)
            wanted = [place for place in range(len(items)) if place not in kept_out]
            written = self._write([items[place] for place in wanted], deadline)
            answers = kept_out | dict(zip(wanted, written, strict=True))
            statuses = [answers[place] for place in range(len(items))]
            there = {keys[place] for place in wanted if answers[place] in _THERE}  # a batch may name a key twice
            self._caps.take_back([keys[place] for place in wanted if keys[place] not in there], deadline)
        if self._undone:  # more than are told at once; what was written anew is wanted again
            self._undone.done(key for (key, _, _), s in zip(items, statuses, strict=True) if s is WriteStatus.STORED)
            for place in self._undone.among([key for key, _, _ in items]):  # what is there is hidden, and will go
                statuses[place] = WriteStatus.FAILED
        return statuses

    def set_caps(self, caps: Mapping[TenantId, int]) -> None:
        """The most bytes that these tenants may have in all servers together; all others may have what they can get.

        Bytes are those of payloads before a codec, and of heads, rounded up. All pools that share the servers should
        have the same caps. Never waits: what is too much goes, oldest first, as its tenant writes.
        """
        self._caps.set(caps)

    def discard(self, keys: Sequence[StoreKey]) -> int:
        """Forgets these keys; returns how many were there. What a server that cannot be reached keeps is hidden here
        until it has heard of it."""
        self._hide(keys)
        discards = Discards(keys, self._form, self._undone)
        with self._guard:
            deadline = MONOTONIC() + self._call_timeout_s
            self._caps.forget(keys, deadline)  # first: what others write from now on is entered again, and counts
            moved = self._servers.each("discard", discards.names, [0] * len(keys), discards.work, deadline)
            self._count_blocks("discard", "Moved", moved)
            self._unlink("discard", discards.parts, deadline)
        return discards.num_removed

    def purge(self, tenant: TenantId, deadline: float) -> int:
        """Removes all values of a tenant from all servers, and its books; how many there were. Other callers go on.

        Looks at every name that a server has, some 0.3 s per million. Raises `UnavailableError` where a server does
        not answer, or does not let it look.

        :param deadline: monotonic.
        """
        with self._guard:
            purge = TenantPurge(tenant)
            if not self._servers.all("purge", purge.find, deadline):
                raise UnavailableError("not all servers have answered, or let it SCAN for what a tenant has")
            self._unlink("purge", purge.names, deadline)
            if not self._servers.all("purge", purge.count_left, deadline) or purge.num_left:
                raise UnavailableError(f"{purge.num_left} values may be left")
        return purge.num_found

    def usage(self) -> Usage:
        """Returns how full the servers are. All numbers are zero when a server does not answer.

        Counts all keys of the database, parts and other people's included, and the memory of all the server's data.
        """
        with self._guard:
            servers = self._memory()
        return total(servers) if servers else Usage(0, 0, 0)

    def answers(self) -> bool:
        """Whether all servers answer now. One that does not often enough is left alone, which is logged."""
        with self._guard:
            return bool(self._memory())

    def check(self) -> None:
        """Raises `ClosedError` after `close`, and verifies nothing: there are no books on this side."""
        with self._guard:
            pass

    def close(self) -> None:
        """Waits for calls in flight, at most until their deadline, and closes the connections. Idempotent."""
        if self._guard.close():
            self._topology.close()

    def _write(self, items: Sequence[Item[ReadableBuffer]], deadline: float) -> list[WriteStatus]:
        """Writes blocks that their tenants may have."""
        writer = BlockWriter(items, key_names([key for key, _, _ in items]), self._form)
        self._each("write", writer.names, [len(payload) for _, payload, _ in items], writer.write_small, deadline)
        self._count_blocks("write", "Moved", writer.write_large(self._servers, deadline))
        self._unlink("write", writer.to_drop, deadline)
        self._count_blocks("write", "ReadOnly", len(writer.read_only))
        if writer.refusal:
            self._takes_writes = False
            self._refused.warning(f"tier {self._name}: takes no more blocks: {writer.refusal}")
        elif not self._takes_writes and WriteStatus.STORED in writer.statuses:
            self._takes_writes = True
            _log.info("tier %s: takes writes again", self._name, extra={"tier": self._name})
        return writer.statuses

    def _evict(self, small: Sequence[StoreKey], others: Sequence[StoreKey], deadline: float) -> None:
        """Removes blocks for others of their tenants: those of one value, and those that may have more. A server that
        does not hear of it now is told later, as of a discard."""
        victims = Discards([*small, *others], self._form, self._undone, num_small=len(small))
        self._servers.each("write", victims.names, [0] * len(victims.names), victims.work, deadline)
        self._hide(victims.untold)
        self._unlink("write", victims.parts, deadline)
        self._evicted.inc(victims.num_removed)

    def _hide(self, keys: Sequence[StoreKey]) -> None:
        """None of these blocks is found here until its server has heard that it goes."""
        if num_given_up := self._undone.add(keys):
            self._refused.warning(
                f"tier {self._name}: {num_given_up} discards given up: the server is out of reach and they are too many"
            )

    def _note_no_books(self, refusal: Exception) -> None:
        error = self._clients.translated(refusal)
        self._metrics.io_errors.labels(self._name, "write", type(error).__name__).inc()
        self._refused.warning(f"tier {self._name}: nothing is written for tenants with a cap: {error}")

    def _each(self, op: str, names: Sequence[bytes], sizes: Sequence[int], work: Work, deadline: float) -> None:
        """`Servers.each`, after each server was told of discards that it has not heard of.

        What is written or found afterwards must not be of before a discard.
        """
        discards = Discards(self._undone.oldest(_DISCARDS_AT_ONCE), self._form, self._undone)
        num_first = len(discards.names)

        def both(talk: Conversation, places: list[int]) -> list[int]:
            overdue = [place for place in places if place < num_first]
            moved = discards.repeat(talk, overdue) if overdue else []
            rest = [place - num_first for place in places if place >= num_first]
            return moved + [num_first + place for place in (work(talk, rest) if rest else ())]

        num_moved = self._servers.each(op, [*discards.names, *names], [*[0] * num_first, *sizes], both, deadline)
        self._count_blocks(op, "Moved", num_moved)
        self._unlink(op, discards.parts, deadline)
        if self._servers.have_answered and self._is_first():
            self._look_at_policy(deadline)

    def _is_first(self) -> bool:
        """True for the one call that looks at the policy."""
        with self._lock:
            first, self._policy_seen = not self._policy_seen, True
            return first

    def _look_at_policy(self, deadline: float) -> None:
        """Logs what will go wrong with how a server makes room, and what to set there. A server that does not tell is
        not a server that fails."""
        with contextlib.suppress(KvtierError):
            warnings = (server.warning(ttl=self._form.ttl_ms > 0) for server in self._reports("policy", deadline))
            if warning := next(filter(None, warnings), None):
                text = f"Redis at {self._address} {warning}"
                _log.warning("tier %s: %s", self._name, text, extra={"tier": self._name})

    def _unlink(self, op: str, names: Sequence[bytes], deadline: float) -> None:
        """Drops values, wherever they are."""
        if names:
            self._servers.each(op, names, [0] * len(names), partial(_drop, names), deadline)

    def _without_discarded(self, keys: Sequence[StoreKey], statuses: list[Status]) -> list[Status]:
        for place in self._undone.among(keys) if self._undone else ():
            statuses[place] = Status.MISS
        return statuses

    def _memory(self) -> list[ServerMemory]:
        """What each server says; empty when one does not answer. One that forbids INFO is not one that fails."""
        try:
            return self._reports("usage", MONOTONIC() + self._call_timeout_s)
        except KvtierError as error:
            self._metrics.io_errors.labels(self._name, "usage", type(error).__name__).inc()
            return []

    def _reports(self, op: str, deadline: float) -> list[ServerMemory]:
        answers: list[list[Any]] = []

        def work(talk: Conversation) -> None:
            of_server: list[Any] = []
            talk.ask(REPORT, lambda i, answer: of_server.append(answer), lambda refusal: True)
            answers.append(of_server)

        if not self._servers.all(op, work, deadline):
            return []
        for answer in (answer for of_server in answers for answer in of_server):
            if isinstance(answer, Exception):
                raise self._clients.translated(answer)
        return [ServerMemory.parse(of_server) for of_server in answers]

    def _count_blocks(self, op: str, error: str, count: int) -> None:
        if count:
            self._metrics.io_errors.labels(self._name, op, error).inc(count)


def _drop(names: Sequence[bytes], talk: Conversation, places: list[int]) -> list[int]:
    talk.ask([("UNLINK", names[place]) for place in places], lambda i, answer: None, takes_no_writes)
    return []
