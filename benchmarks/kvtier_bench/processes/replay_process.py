"""One of the clients of `kvtier bench replay`: serves requests of a trace from a cache pool, as an engine would.

`python -m kvtier_bench.processes.replay_process` reads JSON lines: first which `path` it has to the `pool` and how long
blocks are (`sizes`), then `{"keys": [...]}` for each request. It answers `{"found": how many of the blocks were there,
"loaded": how many from the first one on were loaded, "refused": how many were not stored, "seconds": ...}`.
"""

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import NamedTuple

from kvtier.codec.checksums import checksum
from kvtier.errors import KvtierError
from kvtier.identity.keys import ChainHash, NamespaceId, StoreKey, store_key, tenant_id
from kvtier.memory.malloc import keep_freed_memory
from kvtier.tiers.base import Item, Status, WriteStatus
from kvtier.tiers.pool.tier import PoolTier
from kvtier_bench.measuring.blocks import TENANT
from kvtier_bench.processes.json_process import JsonProcess
from kvtier_bench.processes.pool_process import PoolProcess

_KEPT = (WriteStatus.STORED, WriteStatus.EXISTS)
_MOST_TRIES, _PAUSE_S = 500, 0.01
"""How often blocks are offered to a pool that is behind its disk, and how long after each time."""


class Served(NamedTuple):
    """What became of a request."""

    found: int
    """Blocks that were there."""
    loaded: int
    """Blocks from the first one on that were there, and were loaded."""
    refused: int
    """Blocks that the pool did not take."""
    seconds: float


class ReplayClient:
    """A client process, started. One thread."""

    def __init__(self, pool: PoolProcess, path: str, sizes: Sequence[int], stack: ExitStack) -> None:
        """:param stack: ends the process."""
        first = {"pool": asdict(pool), "path": path, "sizes": list(sizes)}
        self._process = stack.enter_context(JsonProcess(__name__, first))

    def serve(self, keys: Sequence[int]) -> Served:
        """Has the process serve a request of these blocks, and waits. Raises `KvtierError` for wrong content."""
        self._process.tell({"keys": list(keys)})
        return Served(**self._process.answer())


def size_of(key: int, sizes: Sequence[int]) -> int:
    """The payload bytes of a block: always the same for a key, and as many keys have one size as another."""
    return sizes[key * 2_654_435_761 % 2**32 % len(sizes)]


def _content(key: StoreKey, nbytes: int) -> bytes:
    """What a block has to hold."""
    return hashlib.shake_128(key).digest(nbytes)


def _store_key(number: int) -> StoreKey:
    chain_hash = ChainHash(hashlib.sha256(number.to_bytes(8, "little")).digest())
    return store_key(tenant_id(TENANT), NamespaceId(bytes(16)), chain_hash)


def _serve_request(tier: PoolTier, sizes: Sequence[int], numbers: Sequence[int]) -> Served:
    """Looks up, loads the run from the first block on, and stores the rest."""
    start = time.perf_counter()
    keys = [_store_key(number) for number in numbers]
    nbytes = [size_of(number, sizes) for number in numbers]
    statuses = tier.lookup(keys)
    num_leading = next((i for i, status in enumerate(statuses) if status is not Status.HIT), len(keys))
    into = [memoryview(bytearray(size)) for size in nbytes[:num_leading]]
    read = tier.read(keys[:num_leading], into)
    num_loaded = next((i for i, status in enumerate(read) if status is not Status.HIT), num_leading)
    for key, buffer, status in zip(keys, into, read, strict=False):
        if status is Status.HIT and buffer != _content(key, len(buffer)):
            raise KvtierError(f"block {key.hex()}: the pool gave wrong bytes")
    items = []
    for key, size in zip(keys[num_loaded:], nbytes[num_loaded:], strict=True):
        payload = _content(key, size)
        items.append((key, payload, checksum(key, payload)))
    num_refused = _store(tier, items)
    return Served(statuses.count(Status.HIT), num_loaded, num_refused, time.perf_counter() - start)


def _store(tier: PoolTier, items: Sequence[Item[bytes]]) -> int:
    """How many blocks the pool did not take. It hears of those for which it is behind its disk once more: in the trace
    there are seconds between requests, and here there are none."""
    for _ in range(_MOST_TRIES):
        statuses = tier.write(items)
        throttled = [item for item, status in zip(items, statuses, strict=True) if status is WriteStatus.THROTTLED]
        num_refused = sum(status not in _KEPT for status in statuses)
        if not throttled or num_refused > len(throttled):
            break
        items = throttled
        time.sleep(_PAUSE_S)
    return num_refused


def _run() -> None:
    keep_freed_memory()
    first = json.loads(sys.stdin.readline())
    pool = PoolProcess(**first["pool"])
    with ExitStack() as stack:
        serve = partial(_serve_request, pool.tier(first["path"], stack, only=False), first["sizes"])
        for line in sys.stdin:
            print(json.dumps(serve(json.loads(line)["keys"])._asdict()), flush=True)


if __name__ == "__main__":
    _run()
