"""A process that works a seeded load on a disk tier until it is killed, by itself or by others.

    python disk_crash_child.py FOLDER SEED ROUND DIES_AT

Says on stdout what it is about to do and what became of it: one JSON list per line, before and after each operation.
With DIES_AT above 0 it kills itself in that file operation, half of it done.
"""

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Sequence

from kvtier.identity.keys import TenantId, tenant_id
from kvtier.testing.blocks import make_key, make_payload, summed
from kvtier.tiers.base import WriteStatus
from kvtier.tiers.disk.medium.files import OsFiles, supports_direct
from kvtier.tiers.disk.tier import DiskTier

CAPACITY_BYTES = 1 << 20
SEGMENT_BYTES = 64 << 10
TENANTS = ("red", "blue")
NUM_LABELS = 60
"""Blocks of each tenant: together they need about twice the capacity."""


class DyingFiles(OsFiles):
    """Real files until the operation with a certain number."""

    def __init__(self, dies_at: int, *, direct: bool) -> None:
        super().__init__(direct=direct)
        self._lock = threading.Lock()
        self._left = dies_at or sys.maxsize
        """Guarded by _lock."""

    def _is_last(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left == 0

    def create(self, path: str, nbytes: int) -> int:
        fd = super().create(path, nbytes)
        if self._is_last():
            die()
        return fd

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        if self._is_last():
            left = sum(map(len, buffers)) // 2 // 4096 * 4096
            front = []
            for buffer in buffers:
                front.append(buffer[:left])
                left -= len(front[-1])
            super().write(fd, [buffer for buffer in front if len(buffer)], offset)
            die()
        super().write(fd, buffers, offset)

    def truncate(self, fd: int, nbytes: int) -> None:
        super().truncate(fd, nbytes)
        if self._is_last():
            die()

    def remove(self, path: str) -> None:
        super().remove(path)
        if self._is_last():
            die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def say(*words: object) -> None:
    os.write(1, (json.dumps(words) + "\n").encode())


def payload_bytes(tenant: str, label: int) -> int:
    """The same for every version of a block."""
    return random.Random(f"{tenant}/{label}").choice([700, 4096, 5000, 16384, 20000])


def payload(tenant: str, label: int, version: str) -> bytes:
    """What a write of this version stores: a block that comes back after it was forgotten is found out by it."""
    return make_payload((tenant, label, version), payload_bytes(tenant, label))


def work(tier: DiskTier, load: random.Random, round_name: str) -> None:
    """Writes, reads, discards and purges for ever."""
    number = 0
    while True:
        number += 1
        tenant, ident = _tenant(load)
        labels = load.sample(range(NUM_LABELS), load.randrange(1, 7))
        keys = [make_key(label, tenant=ident) for label in labels]
        what = load.random()
        if what < 0.6:
            version = f"{round_name}.{number}"
            say("write", tenant, labels, version)
            items = [summed(key, payload(tenant, label, version)) for key, label in zip(keys, labels, strict=True)]
            statuses = tier.write(items)
            say("wrote", [status is WriteStatus.STORED for status in statuses])
        elif what < 0.8:
            into = [memoryview(bytearray(payload_bytes(tenant, label))) for label in labels]
            tier.read(keys, into)
        elif what < 0.99:
            say("discard", tenant, labels)
            tier.discard(keys)
            say("discarded")
        else:
            say("purge", tenant)
            tier.purge(ident)
            say("purged")


def _tenant(load: random.Random) -> tuple[str, TenantId]:
    tenant = load.choice(TENANTS)
    return tenant, tenant_id(tenant)


def open_tier(folder: str, files: OsFiles | None = None) -> DiskTier:
    """With one I/O thread: the order of operations is the seed's."""
    return DiskTier.open(
        folder, CAPACITY_BYTES, reserve_bytes=0, segment_bytes=SEGMENT_BYTES, num_threads=1, files=files
    )


if __name__ == "__main__":
    folder, seed, round_name, dies_at = sys.argv[1:]
    say("start")
    tier = open_tier(folder, DyingFiles(int(dies_at), direct=supports_direct(os.path.dirname(folder))))
    say("open")
    work(tier, random.Random(f"{seed}/{round_name}"), round_name)
