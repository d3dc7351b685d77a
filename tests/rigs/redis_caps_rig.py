"""Tenants with caps in a Redis, in tests: their blocks, their books, and a clock of the server that a test turns."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
import redis

from kvtier.identity.keys import StoreKey, TenantId, tenant_id
from kvtier.testing.blocks import make_key, make_payload, summed
from kvtier.tiers.base import Item, Status, WriteStatus
from kvtier.tiers.redis import RedisTier, cap_script
from kvtier.tiers.redis.cap_script import NUM_BOOKS, book_name
from redis_rig import MIB, RedisServer, connect

RED, BLUE = tenant_id("red"), tenant_id("blue")
BLOCK_BYTES = 15 * 1024
"""With its head: four units."""
CAP_BYTES = 4 * MIB
MOST_BLOCKS = CAP_BYTES // (16 * 1024)
STORED, EXISTS, FULL, FAILED = WriteStatus.STORED, WriteStatus.EXISTS, WriteStatus.FULL, WriteStatus.FAILED


def keys(labels: Sequence[object], tenant: TenantId = RED) -> list[StoreKey]:
    return [make_key(label, tenant=tenant) for label in labels]


def items(labels: Sequence[object], tenant: TenantId = RED, nbytes: int = BLOCK_BYTES) -> list[Item[bytes]]:
    return [summed(make_key(label, tenant=tenant), make_payload(label, nbytes)) for label in labels]


def capped(server: RedisServer, cap_bytes: int = CAP_BYTES, **settings: object) -> RedisTier:
    tier = connect(server.url, **settings)  # type: ignore[arg-type]
    tier.set_caps({RED: cap_bytes})
    return tier


def stored_bytes(client: redis.Redis, tenant: TenantId = RED) -> int:
    """What really lies there."""
    return sum(client.strlen(name) for name in client.scan_iter(f"kvt1:{tenant.hex()}:*", count=1000))


def check_books(client: redis.Redis, tenant: TenantId = RED) -> int:
    """The units that count; each book's sum must be what its blocks make."""
    total = 0
    for book in range(NUM_BOOKS):
        entries = dict(client.zrange(book_name(tenant, book), 0, -1, withscores=True))
        used = -int(entries.pop(b"used", 0))
        live = {member: int(score) for member, score in entries.items() if score >= 1}
        assert used == sum(score % (1 << 20) for score in live.values())
        assert all(len(member) == 48 for member in live)
        assert all(member[:1] == b"d" and len(member) == 49 for member in entries.keys() - live.keys())
        total += used
    return total


def there(tier: RedisTier, labels: Sequence[object], tenant: TenantId = RED) -> list[bool]:
    return [status is Status.HIT for status in tier.lookup(keys(labels, tenant))]


@contextlib.contextmanager
def forbidden(client: redis.Redis, *commands: str) -> Iterator[None]:
    """Inside, nobody may use these commands."""
    client.execute_command("ACL SETUSER default", *(f"-{command}" for command in commands))
    try:
        yield
    finally:
        client.execute_command("ACL SETUSER default", *(f"+{command}" for command in commands))


class Clock:
    """Turns the server's clock, as the books see it, with every change of a book."""

    def __init__(self, client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
        self._client = client
        turned = "{1800000000 + redis.call('INCRBY', 'clock', 3), 0}"
        monkeypatch.setattr(cap_script, "_SCRIPT", cap_script._SCRIPT.replace("redis.call('TIME')", turned))

    def advance(self, seconds: int) -> None:
        self._client.incrby("clock", seconds)


def turned_clock(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """For a fixture `clock`."""
    return Clock(client, monkeypatch)


def write_all(tier: RedisTier, labels: range, step: int = 16) -> Counter[WriteStatus]:
    answers: Counter[WriteStatus] = Counter()
    for start in range(labels.start, labels.stop, step):
        answers.update(tier.write(items(range(start, min(start + step, labels.stop)))))
    return answers
