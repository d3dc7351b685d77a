"""The redis tier: blocks in a Redis or Valkey that the pools of a site share. What fails there is a miss here.

A block lies at `kvt1:TENANT:NAMESPACE:HASH`, as a string: header and payload of its stored form. A string, not a
hash of two fields: commands go out of the buffers they lie in (`connection`), so nothing has to be joined, and
SET knows NX and a time to live. A payload, as stored, of more than `max_value_bytes` lies in parts: the first behind
the header, the others at names that `commands.part_names` gives. The first part is written last: where it is,
the block is whole, until the server evicts one of the others; then the block is a miss and what is left is dropped.

2 MiB blocks over loopback, beside redis-py in the same run: written at 1.9 GB/s (SET 0.7, pipelined 1.0), read and
verified at 3.3 (GET 2.9, pipelined 1.9); a lookup of 4,096 keys takes 3.6 ms (15). A server whose allocator rounds up
as jemalloc does counts 2.5 MiB of `maxmemory` for such a block.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence

from kvtier.clock import MONOTONIC
from kvtier.codec.stored_form import HEADER_BYTES, Codec, parse_stored_header
from kvtier.errors import ConfigError, CorruptBlockError, KvtierError
from kvtier.identity.keys import StoreKey
from kvtier.memory.buffers import ReadableBuffer
from kvtier.metrics import Metrics
from kvtier.system.quiet_log import QuietLog
from kvtier.tiers.base import Status, Usage, WriteStatus, require_pairs
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.common.call_guard import CallGuard
from kvtier.tiers.common.deadlines import RemoteCalls
from kvtier.tiers.common.packer import BlockPacker
from kvtier.tiers.redis.address import RedisAddress
from kvtier.tiers.redis.commands import MAX_PARTS, command, exists, key_name, part_names
from kvtier.tiers.redis.memory import NUM_ANSWERS, REPORT, ServerMemory, total
from kvtier.tiers.redis.reader import BlockReader
from kvtier.tiers.redis.servers import RedisServers, each
from kvtier.tiers.redis.undone import UndoneDiscards
from kvtier.tiers.redis.writer import BlockWriter

_log = logging.getLogger(__name__)

MAX_VALUE_BYTES = 4 << 20
"""Payload bytes in one value: allocators on both sides fall off a cliff with larger ones."""
_WRONGTYPE = frozenset({"WRONGTYPE"})
_DISCARDS_AT_ONCE = 1024


class RedisTier:
    """`Tier` over Redis 6.2 or later, or Valkey: one server, Sentinel or Cluster. Serves all tenants.

    No call takes longer than `call_timeout_s`, however many batches it is split into; what did not come in
    time is MISS or FAILED. After some failures in a row the server is left alone: calls are answered MISS and
    FAILED at once, until a probe succeeds. Failures are counted in `io_errors` by exception (`BreakerOpen` for
    calls not made, `Moved` for blocks that a Cluster was moving), and logged when the breaker opens and closes.
    Every block is verified against the key asked for; what does not hold is a MISS, is counted in
    `corrupt_blocks` and dropped there.

    The server forgets as it is told: by `ttl_s`, and by `maxmemory` and `maxmemory-policy`. A server that would
    refuse writes instead, or grow without bound, is warned of once. FULL is what it answers when it refuses.

    Any thread. Blocks up to the deadline.
    """

    def __init__(  # noqa: PLR0913 - what may be set, by keyword
        self,
        url: str,
        *,
        username: str | None = None,
        password: str | None = None,
        ttl_s: float = 0.0,
        codec: Codec = Codec.RAW,
        metrics: Metrics,
        breaker: CircuitBreaker,
        call_timeout_s: float = 5.0,
        lookup_timeout_s: float = 5.0,
        connect_timeout_s: float = 1.0,
        max_value_bytes: int = MAX_VALUE_BYTES,
        max_batch_bytes: int = 16 << 20,
        name: str = "redis",
    ) -> None:
        """Connects to nobody yet.

        :param url: see `address`. Raises `ConfigError` when it cannot be one.
        :param username: of the server's ACL; None for its default user.
        :param password: never logged nor part of an error. A Sentinel is told it too.
        :param ttl_s: seconds that a block lives after its last read or write, to the millisecond; 0 for ever. Makes
            reads into writes of the server's: they go to its replicas and its log, a few bytes each.
        :param codec: how payloads are packed on their way. Blocks of any codec are read.
        :param call_timeout_s: seconds, of each call of a verb.
        :param lookup_timeout_s: seconds, of a lookup, which somebody else's answer may be waiting for.
        :param connect_timeout_s: of that, for finding a server and for connecting to it.
        :param max_value_bytes: payload bytes in one value; the same for all who share the server.
        :param max_batch_bytes: payload bytes in one pipeline: what is packed ahead, and what a server holds at most
            for one call that reads. It takes that from `maxmemory`, so a small server evicts for a large pipeline.
        """
        if ttl_s < 0 or call_timeout_s <= 0 or connect_timeout_s <= 0 or max_value_bytes < 1:
            raise ConfigError(
                f"redis tier with ttl_s {ttl_s}, call_timeout_s {call_timeout_s}, connect_timeout_s "
                f"{connect_timeout_s}, max_value_bytes {max_value_bytes}: need >= 0, > 0, > 0, >= 1"
            )
        address = RedisAddress.parse(url)
        self._address = address
        self._servers = RedisServers(address, username=username, password=password, connect_timeout_s=connect_timeout_s)
        self._ttl_ms = max(1, round(ttl_s * 1000)) if ttl_s else 0
        self._packer = BlockPacker(codec, tier=name, metrics=metrics)
        self._max_value_bytes = max_value_bytes
        self._metrics = metrics
        self._call_timeout_s = call_timeout_s
        self._lookup_timeout_s = min(lookup_timeout_s, call_timeout_s)
        self._name = name
        self._calls = RemoteCalls(
            name,
            metrics=metrics,
            breaker=breaker,
            log=_log,
            call_timeout_s=call_timeout_s,
            max_batch_bytes=max_batch_bytes,
            max_batch_blocks=4096,
        )
        self._undone = UndoneDiscards()
        self._guard = CallGuard(f"tier {name}")
        self._dropped, self._refused = QuietLog(_log), QuietLog(_log)
        self._lock = threading.Lock()
        self._policy_seen = False
        """Whether the server was asked how it evicts. Guarded by _lock."""

    @property
    def name(self) -> str:
        return self._name

    def lookup(self, keys: Sequence[StoreKey]) -> list[Status]:
        """See `Tier.lookup`."""
        statuses = [Status.MISS] * len(keys)
        names = [key_name(key) for key in keys]

        def ask(batch: slice, timeout_s: float) -> None:
            def pack(places: Sequence[int]) -> list[bytes]:
                return [b"".join([exists(names[batch.start + place]) for place in places])]

            def take(place: int, answer: object) -> None:
                if answer == 1:
                    statuses[batch.start + place] = Status.HIT

            moved = self._servers.exchange(names[batch], pack, each(take), timeout_s)
            self._count_moved("lookup", len(moved))

        self._repeat_discards()
        self._in_batches("lookup", [0] * len(keys), ask, timeout_s=self._lookup_timeout_s)
        return self._without_discarded(keys, statuses)

    def read(self, keys: Sequence[StoreKey], into: Sequence[memoryview]) -> list[Status]:
        """See `Tier.read`. One copy of the payload: from the socket to `into`; packed ones are unpacked into it."""
        require_pairs(keys, into)
        statuses = [Status.MISS] * len(keys)

        def ask(batch: slice, timeout_s: float) -> None:
            names = [key_name(key) for key in keys[batch]]
            reader = BlockReader(
                keys[batch],
                names,
                into[batch],
                ttl_ms=self._ttl_ms,
                max_value_bytes=self._max_value_bytes,
            )
            deadline = MONOTONIC() + timeout_s
            try:
                reader.read(self._servers, timeout_s)
            finally:
                for place in reader.found.hits:
                    statuses[batch.start + place] = Status.HIT
                self._count_moved("read", reader.found.num_moved)
                for reason in reader.found.corrupt:
                    self._metrics.corrupt_blocks.labels(self._name).inc()
                    self._dropped.warning(f"tier {self._name}: block dropped: {reason}")
            self._unlink(reader.found.to_drop, deadline - MONOTONIC())

        self._repeat_discards()
        self._in_batches("read", [len(buffer) for buffer in into], ask)
        return self._without_discarded(keys, statuses)

    def write(self, items: Sequence[tuple[StoreKey, ReadableBuffer]]) -> list[WriteStatus]:
        """See `Tier.write`. FAILED also when the server stored the block and its answer was lost."""
        statuses = [WriteStatus.FAILED] * len(items)

        def ask(batch: slice, timeout_s: float) -> None:
            writer = BlockWriter(
                items[batch],
                [key_name(key) for key, _ in items[batch]],
                packer=self._packer,
                ttl_ms=self._ttl_ms,
                max_value_bytes=self._max_value_bytes,
            )
            deadline = MONOTONIC() + timeout_s
            try:
                writer.write(self._servers, timeout_s)
            finally:
                statuses[batch] = writer.statuses
                self._count_moved("write", writer.num_moved)
                if writer.refusal:
                    self._refused.warning(f"tier {self._name}: is full: {writer.refusal}")
            self._unlink(writer.to_drop, deadline - MONOTONIC())

        self._repeat_discards()
        self._in_batches("write", [len(payload) for _, payload in items], ask)
        if self._undone:  # more than are told at once; what was written anew is wanted again
            self._undone.done(key for (key, _), s in zip(items, statuses, strict=True) if s is WriteStatus.STORED)
            for place in self._undone.among([key for key, _ in items]):  # what is there is hidden, and will go
                statuses[place] = WriteStatus.FAILED
        return statuses

    def discard(self, keys: Sequence[StoreKey]) -> int:
        """See `Tier.discard`. What a server that cannot be reached keeps is hidden here until it has heard of it."""
        if num_given_up := self._undone.add(keys):
            self._refused.warning(
                f"tier {self._name}: {num_given_up} discards given up: the server is out of reach and they are too many"
            )
        return self._discard(keys)

    def _discard(self, keys: Sequence[StoreKey]) -> int:
        """Tells the server, and takes those it has heard of off the list of the undone."""
        counts: list[int] = []

        def ask(batch: slice, timeout_s: float) -> None:
            deadline = MONOTONIC() + timeout_s
            names = [key_name(key) for key in keys[batch]]
            orphans: list[bytes] = []

            def pack(places: Sequence[int]) -> list[bytes]:
                header = b"%d" % (HEADER_BYTES - 1)
                commands = [
                    command(b"UNLINK", names[place // 2])
                    if place % 2
                    else command(b"GETRANGE", names[place // 2], b"0", header)
                    for place in places
                ]
                return [b"".join(commands)]

            def take(place: int, answer: object) -> None:
                if isinstance(answer, int):
                    counts.append(answer)
                elif isinstance(answer, bytes):
                    orphans.extend(self._further_parts(names[place // 2], answer))

            twice = [name for name in names for _ in range(2)]
            moved = self._servers.exchange(twice, pack, each(take, _WRONGTYPE), timeout_s)
            self._count_moved("discard", len(moved) // 2)
            on_the_move = {place // 2 for place in moved}
            self._undone.done(key for place, key in enumerate(keys[batch]) if place not in on_the_move)
            self._unlink(orphans, deadline - MONOTONIC())

        self._in_batches("discard", [0] * len(keys), ask)
        return sum(counts)

    def _repeat_discards(self) -> None:
        """Before any other call: what it writes or finds must not be of before a discard."""
        if self._undone:
            self._discard(self._undone.oldest(_DISCARDS_AT_ONCE))

    def _without_discarded(self, keys: Sequence[StoreKey], statuses: list[Status]) -> list[Status]:
        for place in self._undone.among(keys) if self._undone else ():
            statuses[place] = Status.MISS
        return statuses

    def usage(self) -> Usage:
        """See `Tier.usage`. All zero when the server does not answer.

        Counts all keys of the database, parts and other people's included, and the memory of all the server's data.
        """
        with self._guard:
            servers = self._memory("usage")
        return total(servers) if servers else Usage(0, 0, 0)

    def policy_warning(self) -> str | None:
        """What will go wrong with how the server makes room, and what to set there; None when nothing will.

        Also None when the server does not tell. The first call that succeeds asks for it, and logs it.
        """
        with self._guard:
            return self._warning_of(self._memory("policy"))

    def check(self) -> None:
        """See `Tier.check`. There are no books on this side."""
        with self._guard:
            pass

    def close(self) -> None:
        """See `Tier.close`. Waits for calls in flight, at most their deadline."""
        if self._guard.close():
            self._servers.close()

    def _in_batches(
        self, op: str, sizes: Sequence[int], ask: Callable[[slice, float], None], timeout_s: float | None = None
    ) -> None:
        def ask_and_look(batch: slice, timeout_s: float) -> None:
            deadline = MONOTONIC() + timeout_s
            ask(batch, timeout_s)
            if self._is_first():
                self._look_at_policy(deadline - MONOTONIC())

        with self._guard:
            self._calls.in_batches(op, sizes, ask_and_look, timeout_s)

    def _is_first(self) -> bool:
        """True for the one call that looks at the policy."""
        with self._lock:
            first, self._policy_seen = not self._policy_seen, True
            return first

    def _look_at_policy(self, timeout_s: float) -> None:
        """A server that does not tell is not a server that fails."""
        with contextlib.suppress(KvtierError):
            answers = self._servers.ask_all(REPORT, NUM_ANSWERS, timeout_s)
            if warning := self._warning_of([ServerMemory.parse(of_server) for of_server in answers]):
                _log.warning("tier %s: %s", self._name, warning)

    def _unlink(self, names: Sequence[bytes], timeout_s: float) -> None:
        """Drops values, wherever they are."""
        if names:
            self._servers.exchange(
                names,
                lambda places: [b"".join([command(b"UNLINK", names[place]) for place in places])],
                each(lambda place, answer: None),
                timeout_s,
            )

    def _further_parts(self, name: bytes, head: bytes) -> list[bytes]:
        """Names of the parts after the first, of a block that begins with `head`."""
        try:
            header = parse_stored_header(head)
        except CorruptBlockError:
            return []
        num_parts = -(-header.stored_length // self._max_value_bytes)
        return part_names(name, header.checksum, min(num_parts, MAX_PARTS))

    def _warning_of(self, servers: Sequence[ServerMemory]) -> str | None:
        for server in servers:
            if warning := server.warning(ttl=self._ttl_ms > 0):
                return f"Redis at {self._address} {warning}"
        return None

    def _memory(self, op: str) -> list[ServerMemory]:
        """Of each server; empty when they do not answer. One that forbids INFO is not one that fails."""
        answers: list[list[object]] = []

        def ask() -> None:
            answers.extend(self._servers.ask_all(REPORT, NUM_ANSWERS, self._call_timeout_s))

        self._calls.attempt(op, ask)
        try:
            return [ServerMemory.parse(of_server) for of_server in answers]
        except KvtierError as error:
            self._metrics.io_errors.labels(self._name, op, type(error).__name__).inc()
            return []

    def _count_moved(self, op: str, count: int) -> None:
        if count:
            self._metrics.io_errors.labels(self._name, op, "Moved").inc(count)
