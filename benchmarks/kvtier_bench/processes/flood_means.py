"""The means by which one tenant can keep a pool busy, each for a thread of its own."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import count

import grpc

from kvtier.clock import MONOTONIC
from kvtier.errors import KvtierError
from kvtier.identity.keys import StoreKey, tenant_id
from kvtier.metrics import Metrics
from kvtier.net.address import Address
from kvtier.protocol import pool_pb2
from kvtier.protocol.block import Verb
from kvtier.protocol.groups import group
from kvtier.testing.blocks import make_key, summed
from kvtier.tiers.base import Item, Status, WriteStatus
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.pool.connection import PoolConnection
from kvtier.tiers.pool.tier import PoolTier
from kvtier_bench.processes.pool_process import SHM, PoolProcess

BLOCK_BYTES = 256 << 10
_BATCH = 16
_NUM_LENGTHS, _LENGTH_STEP = 400, 640
"""How many lengths `lengths` has, and how far they are apart."""
_MANY_KEYS = 4096
_CALL_TIMEOUT_S = 10.0
_NEVER_OPENS = 1 << 30
"""Failures in a row that a breaker takes: whoever floods does not leave a pool alone."""
_NUM_HOLDERS = 8
"""Connections that hold leases and prepared slots."""
_NUM_CALLERS = 8
"""Threads that make gRPC calls, on one connection."""
_RETRY_S = 0.01
_STREAM_S = 0.2
"""A pool has refused a stream of events that it has no place for within this time."""


class Flood:
    """What all means of a process have in common. Any thread."""

    def __init__(self, pool: PoolProcess, label: str, cold_blocks: int) -> None:
        """
        :param label: a name that makes the keys of this process its own.
        :param cold_blocks: how many blocks `cold` reads in turn: more than memory keeps for the tenant.
        """
        self.pool, self.label, self.cold_blocks = pool, label, cold_blocks
        self.ends = threading.Event()
        """Set when all means must end."""
        self.tenant = tenant_id(pool.tenant)
        self._numbers = count()
        self._payload = random.Random(label).randbytes(BLOCK_BYTES)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        """What was done, by name. Guarded by _lock."""

    def note(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def counts(self) -> dict[str, int]:
        """What was done since this was last asked."""
        with self._lock:
            counts, self._counts = dict(self._counts), Counter()
        return counts

    def block(self, label: object, nbytes: int = BLOCK_BYTES) -> Item[memoryview]:
        return summed(self.key(label), memoryview(self._payload)[:nbytes])

    def fresh(self, num: int, nbytes: int = BLOCK_BYTES) -> list[Item[memoryview]]:
        """Blocks that nobody has written yet."""
        return [self.block(next(self._numbers), nbytes) for _ in range(num)]

    def key(self, label: object) -> StoreKey:
        return make_key((self.label, label), tenant=self.tenant)

    def tier(self, path: str, stack: ExitStack) -> PoolTier:
        """Goes on asking, whatever the pool says."""
        tier = PoolTier(
            self.pool.transport(path, metrics := Metrics()),
            self.tenant,
            metrics=metrics,
            breaker=CircuitBreaker(_NEVER_OPENS, 1.0),
            call_timeout_s=_CALL_TIMEOUT_S,
        )
        stack.callback(tier.close)
        return tier

    def dial(self, address: str) -> PoolConnection:
        """A connection without a tier over it; raises as `PoolConnection` does."""
        deadline = MONOTONIC() + _CALL_TIMEOUT_S
        return PoolConnection.open(Address.parse(address), self.pool.token, self.tenant, deadline)

    def write(self, tier: PoolTier, items: Sequence[Item[memoryview]]) -> None:
        statuses = tier.write(items)
        nbytes = sum(len(item[1]) for item, s in zip(items, statuses, strict=True) if s is WriteStatus.STORED)
        self.note(written_blocks=statuses.count(WriteStatus.STORED), written_bytes=nbytes)
        if not nbytes:
            self.ends.wait(_RETRY_S)  # refused: an engine in a loop would come again as soon


def lengths(flood: Flood, stack: ExitStack) -> None:
    """Writes of hundreds of block lengths."""
    tier, rng = flood.tier("unix", stack), random.Random(flood.label)
    while not flood.ends.is_set():
        sizes = [_LENGTH_STEP * rng.randint(1, _NUM_LENGTHS) for _ in range(_BATCH)]
        flood.write(tier, [flood.fresh(1, nbytes)[0] for nbytes in sizes])


def writes(flood: Flood, stack: ExitStack) -> None:
    """Fresh blocks over TCP, as fast as the pool takes them: many times what the tenant may keep."""
    tier = flood.tier("tcp", stack)
    while not flood.ends.is_set():
        flood.write(tier, flood.fresh(_BATCH))


def mapped_writes(flood: Flood, stack: ExitStack) -> None:
    """Writes all the time, to slots in the pool's memory."""
    tier = flood.tier(SHM if flood.pool.shared_memory else "unix", stack)
    while not flood.ends.is_set():
        flood.write(tier, flood.fresh(_BATCH))


def cold(flood: Flood, stack: ExitStack) -> None:
    """Reads of more blocks than the tenant has memory for: most come from disk, and what is gone is written again."""
    tier = flood.tier("tcp", stack)
    into = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(_BATCH)]
    for start in cycle_of(flood.cold_blocks, _BATCH):
        if flood.ends.is_set():
            return
        items = [flood.block(("cold", start + i)) for i in range(_BATCH)]
        statuses = tier.read([key for key, _, _ in items], into)
        flood.note(read_blocks=statuses.count(Status.HIT))
        if missing := [item for item, status in zip(items, statuses, strict=True) if status is Status.MISS]:
            flood.write(tier, missing)


def cycle_of(num: int, step: int) -> Iterator[int]:
    """0, step, 2 * step, ... below num, again and again."""
    while True:
        yield from range(0, num, step)


def deletes(flood: Flood, stack: ExitStack) -> None:
    """Discards of thousands of keys, a few of which are there."""
    tier = flood.tier("tcp", stack)
    absent = [flood.key(("absent", i)) for i in range(_MANY_KEYS)]
    while not flood.ends.is_set():
        items = flood.fresh(_BATCH, 4096)
        flood.write(tier, items)
        tier.discard([key for key, _, _ in items] + absent)
        flood.note(discards=1)


def lookups(flood: Flood, stack: ExitStack) -> None:
    """Lookups of thousands of keys that are not there, so that every tier is asked."""
    tier = flood.tier("tcp", stack)
    keys = [flood.key(("nowhere", i)) for i in range(_MANY_KEYS)]
    while not flood.ends.is_set():
        tier.lookup(keys)
        flood.note(lookups=1)


def held(flood: Flood, stack: ExitStack) -> None:
    """Leases and prepared slots over many connections, as much as the pool gives, never given back."""
    address = flood.pool.unix if flood.pool.shared_memory else ""
    connections = []
    for _ in range(_NUM_HOLDERS if address else 0):
        with suppress(KvtierError, OSError):
            connections.append(stack.enter_context(closing(flood.dial(address))))
    with ExitStack() as tiers:
        leased = flood.fresh(_BATCH)
        flood.write(flood.tier("unix", tiers), leased)
    lease = {"groups": group([key for key, _, _ in leased], [BLOCK_BYTES] * _BATCH).fields}
    while connections and not flood.ends.is_set():
        for connection in list(connections):
            prepared = [key for key, _, _ in flood.fresh(_BATCH)]
            slots = {"groups": group(prepared, [BLOCK_BYTES] * _BATCH).fields}
            for verb, fields in ((Verb.ACQUIRE, lease), (Verb.PREPARE, slots)):
                with _dropped_if_ended(connection, connections):
                    connection.ask(verb, fields, (), MONOTONIC() + _CALL_TIMEOUT_S)
            flood.note(holds=2)


@contextmanager
def _dropped_if_ended(connection: PoolConnection, connections: list[PoolConnection]) -> Iterator[None]:
    try:
        yield
    except (KvtierError, OSError):
        if connection in connections:
            connections.remove(connection)


def connections(flood: Flood, stack: ExitStack) -> None:
    """Opens as many connections as the pool gives; then each new one for an old one."""
    opened: list[PoolConnection] = []

    def close_all() -> None:
        for connection in opened:
            connection.close()

    stack.callback(close_all)
    while not flood.ends.is_set():
        try:
            opened.append(flood.dial(flood.pool.tcp))
            flood.note(connections=1)
        except (KvtierError, OSError):
            flood.note(refused_connections=1)
            if opened:
                opened.pop(0).close()


def calls(flood: Flood, stack: ExitStack) -> None:
    """gRPC calls side by side: reads, writes and large lookups."""
    path_tier = flood.tier("grpc", stack)

    def call() -> None:
        into = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(_BATCH)]
        keys = [flood.key(("nowhere", i)) for i in range(_MANY_KEYS)]
        while not flood.ends.is_set():
            items = flood.fresh(_BATCH)
            flood.write(path_tier, items)
            path_tier.read([key for key, _, _ in items], into)
            path_tier.lookup(keys)
            flood.note(calls=3)

    threads = [threading.Thread(target=call, name="flood-call") for _ in range(_NUM_CALLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def events(flood: Flood, stack: ExitStack) -> None:
    """Opens as many streams of events as the pool gives, and reads none of them."""
    metadata = (("authorization", f"Bearer {flood.pool.token}"),)
    method = f"/{pool_pb2.DESCRIPTOR.services_by_name['Pool'].full_name}/Events"
    while not flood.ends.is_set():
        channel = grpc.insecure_channel(flood.pool.grpc, options=[("grpc.use_local_subchannel_pool", 1)])
        stack.callback(channel.close)
        call: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(method)
        stream = call(b"", metadata=metadata)
        flood.ends.wait(_STREAM_S)
        if stream.is_active():
            flood.note(streams=1)
        else:
            flood.note(refused_streams=1)
            channel.close()


Mean = Callable[[Flood, ExitStack], None]
MEANS: Mapping[str, Mean] = {
    mean.__name__: mean
    for mean in (lengths, writes, cold, mapped_writes, connections, held, deletes, calls, lookups, events)
}
"""The means by name, in an order that divides them well when they are dealt out to processes one by one."""


def flood_for(flood: Flood, means: Sequence[str], seconds: float) -> dict[str, int]:
    """Uses these means at a time for so many seconds, then gives everything back. What was done."""
    flood.ends.clear()

    def use(mean: Mean) -> None:
        with ExitStack() as stack, suppress(KvtierError, OSError, grpc.RpcError):
            mean(flood, stack)

    threads = [threading.Thread(target=use, args=(MEANS[name],), name=f"flood-{name}") for name in means]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    flood.ends.set()
    for thread in threads:
        thread.join()
    return flood.counts()
