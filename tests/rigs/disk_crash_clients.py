"""A process in which several clients work on one disk tier at once, until it is killed.

    python disk_crash_clients.py FOLDER LOAD

LOAD is a `Load` as JSON. Says on stdout what each client is about to do and what became of it: one JSON list per line,
before and after each call, in the order in which that happened.
"""

import contextlib
import errno
import itertools
import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from disk_crash_child import DyingFiles, die, say
from kvtier.identity.keys import StoreKey, tenant_id
from kvtier.testing.blocks import make_key, make_payload, summed
from kvtier.testing.faults import FaultyFiles
from kvtier.tiers.base import Status
from kvtier.tiers.disk.medium.files import FileLayer, supports_direct
from kvtier.tiers.disk.state.segment_files import SyncPolicy
from kvtier.tiers.disk.tier import DiskTier

TENANTS = ("red", "blue", "green")
BLOCKS = range(150)
"""Blocks of all tenants, in turns."""
_HOT = 9
"""Blocks that half of all calls are about, so that clients meet."""
_MOST = 30
"""Blocks of a large write: more than a segment takes."""


@dataclass(frozen=True, slots=True)
class Load:
    """One process's work."""

    seed: str
    num_clients: int
    capacity_bytes: int
    segment_bytes: int
    num_threads: int
    direct: bool
    sync: str
    faults: float
    """Share of operations on files that fail."""
    most_pause_s: float
    """Before and after operations on files: others come in between."""
    dies_at: int
    """The number of the operation on files in which it kills itself; 0: it does not."""
    dies_answering: int
    """The number of the discard after whose answer it kills itself at once; 0: likewise."""

    def dump(self) -> str:
        return json.dumps(asdict(self))

    def is_direct(self, folder: str) -> bool:
        return self.direct and supports_direct(os.path.dirname(folder))

    def open(self, folder: str, files: FileLayer) -> DiskTier:
        return DiskTier.open(
            folder,
            self.capacity_bytes,
            reserve_bytes=0,
            segment_bytes=self.segment_bytes,
            num_threads=self.num_threads,
            sync=SyncPolicy(self.sync),
            files=files,
        )


class RoughFiles(DyingFiles):
    """They pause now and then, before and after what they do. What `FaultyFiles` lets pass fails by chance, too."""

    def __init__(self, load: Load, *, direct: bool) -> None:
        super().__init__(load.dies_at, direct=direct)
        self._most_s = load.most_pause_s
        self.faults = 0.0
        """Share of cuts, removals and syncs that fail. Set before clients begin."""

    def create(self, path: str, nbytes: int) -> int:
        with self._pauses():
            return super().create(path, nbytes)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        with self._pauses():
            super().write(fd, buffers, offset)

    def truncate(self, fd: int, nbytes: int) -> None:
        with self._pauses():
            self._may_fail()
            super().truncate(fd, nbytes)

    def remove(self, path: str) -> None:
        with self._pauses():
            self._may_fail()
            super().remove(path)

    def sync(self, fd: int) -> None:
        self._may_fail()
        super().sync(fd)

    @contextlib.contextmanager
    def _pauses(self) -> Iterator[None]:
        self._pause()
        yield
        self._pause()

    def _may_fail(self) -> None:
        if random.random() < self.faults:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _pause(self) -> None:
        if self._most_s and random.random() < 0.3:
            time.sleep(random.uniform(0, self._most_s))


def tenant_of(block: int) -> str:
    return TENANTS[block % len(TENANTS)]


def key_of(block: int) -> StoreKey:
    return make_key(block, tenant=tenant_id(tenant_of(block)))


def payload_bytes(block: int) -> int:
    """The same for every version of a block."""
    return (700, 4096, 5000, 16384, 20000)[block // len(TENANTS) % 5]


def payload(block: int, version: str) -> bytes:
    """Bytes that say which version they are, and that no other has."""
    name = f"{block}/{version}\n".encode()
    return name + make_payload((block, version), payload_bytes(block) - len(name))


def version_of(block: int, found: bytes) -> str:
    """The version that a block was read in; "wrong" if nobody ever wrote these bytes."""
    name = found[:64].partition(b"\n")[0].decode(errors="replace")
    version = name.partition("/")[2]
    return version if name == f"{block}/{version}" and found == payload(block, version) else "wrong"


def read_versions(tier: DiskTier, blocks: Sequence[int]) -> list[str | None]:
    """None: it is not there."""
    into = [bytearray(payload_bytes(block)) for block in blocks]
    statuses = tier.read([key_of(block) for block in blocks], [memoryview(buffer) for buffer in into])
    return [
        version_of(block, bytes(buffer)) if status is Status.HIT else None
        for block, buffer, status in zip(blocks, into, statuses, strict=True)
    ]


def work(tier: DiskTier, load: Load, client: int, answers: Iterator[int]) -> None:
    """Writes, reads, discards and purges for ever."""
    order = random.Random(f"{load.seed}/{client}")
    number = 0
    try:
        while True:
            number += 1
            what = _call(tier, order, f"{load.seed}.{client}.{number}")
            if what == "discard" and next(answers) == load.dies_answering:
                die()
    except BaseException as error:
        say("raised", f"{load.seed}.{client}.{number}", repr(error))
        raise


def _call(tier: DiskTier, order: random.Random, call: str) -> str:
    """What it was.

    :param call: its name, and that of the version if it is a write.
    """
    what = order.random()
    among = BLOCKS[:_HOT] if order.random() < 0.5 else BLOCKS
    blocks = order.sample(among, _MOST if what < 0.02 and among == BLOCKS else order.randrange(1, 7))
    keys = [key_of(block) for block in blocks]
    if what < 0.5:
        say("write", call, blocks)
        statuses = tier.write([summed(key, payload(block, call)) for key, block in zip(keys, blocks, strict=True)])
        say("wrote", call, [status.name for status in statuses])
        return "write"
    if what < 0.7:
        say("read", call, blocks)
        say("got", call, read_versions(tier, blocks))
        return "read"
    if what < 0.99:
        say("discard", call, blocks)
        tier.discard(keys)
        say("discarded", call)
        return "discard"
    tenant = order.choice(TENANTS)
    say("purge", call, [block for block in BLOCKS if tenant_of(block) == tenant])
    tier.purge(tenant_id(tenant))
    say("purged", call)
    return "purge"


if __name__ == "__main__":
    folder, options = sys.argv[1:]
    load = Load(**json.loads(options))
    say("start")
    with contextlib.redirect_stdout(sys.stderr):  # it prints its seed
        rough = RoughFiles(load, direct=load.is_direct(folder))
        files = FaultyFiles(rough, seed=random.Random(load.seed).getrandbits(32))
    tier = load.open(folder, files)
    files.fail_by_chance(load.faults)
    rough.faults = load.faults
    say("open")
    answers = itertools.count(1)
    clients = [threading.Thread(target=work, args=(tier, load, n, answers)) for n in range(load.num_clients)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
