"""LMCache's local disk backend, called in this process: a file per block, past the page cache (`use_odirect`).

`batched` is what its storage manager calls: `batched_submit_put_task`, waited for until every file is written, and
`batched_get_blocking`, into memory of LMCache's own. Nothing that is read is verified. A read finds several times as
many blocks as a round reads, and takes some of them, at random. The third argument is the folder.
"""

import asyncio
import contextlib
import os
import random
import sys
import threading
from collections.abc import Iterator

os.environ |= {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
os.environ["LMCACHE_LOG_LEVEL"] = "ERROR"

import numpy as np
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend
from peer import Blocks, main

_ROUNDS = 4
"""What the disk is filled with before a round reads some of it."""
_CPU_ROUNDS = 3
"""Memory of LMCache's: sources, what is read, and what was read before."""
_THREADS = 4
_TIMEOUT_S = 60.0
_CALL = "batched"


class LMCacheDiskPeer:
    """The backend, and the blocks to write in memory of its own, as an engine's are."""

    def __init__(self, blocks: Blocks, backend: LocalDiskBackend, cpu: LocalCPUBackend) -> None:
        self.pids: list[int] = []
        self.calls = {"read": [_CALL], "write": [_CALL]}
        self._blocks, self._backend = blocks, backend
        self._order = random.Random(0)
        self._wanted: list[CacheEngineKey] = []
        self._read: list[MemoryObj] = []
        self._sources: list[MemoryObj] = []
        for source in blocks.sources:
            block = cpu.allocate(torch.Size([blocks.payload_bytes // 2]), torch.bfloat16, MemoryFormat.KV_2LTD)
            if block is None:
                raise RuntimeError("no memory for the blocks")
            np.frombuffer(block.byte_array, np.uint8)[:] = source
            self._sources.append(block)
        self._filled = False

    def prepare(self, op: str, call: str, batch: int) -> None:
        slots = range(len(self._sources))
        if op == "write":
            for slot in slots:
                self._backend.remove(_key(_ROUNDS, slot))
            return
        if not self._filled:
            for part in range(_ROUNDS):
                self._write([_key(part, slot) for slot in slots], self._sources)
            self._filled = True
        for block in self._read:
            block.ref_count_down()
        self._read = []
        self._wanted = [_key(self._order.randrange(_ROUNDS), slot) for slot in slots]

    def move(self, op: str, call: str, slots: range) -> None:
        if op == "write":
            self._write([_key(_ROUNDS, slot) for slot in slots], self._sources[slots.start : slots.stop])
            return
        order = self._order.sample(slots, len(slots))
        found = self._backend.batched_get_blocking([self._wanted[slot] for slot in order])
        for slot, block in zip(order, found, strict=True):
            if block is None:
                raise RuntimeError("a read missed")
            self._read.append(block)
            self._blocks.into[slot] = np.frombuffer(block.byte_array, np.uint8)

    def _write(self, keys: list[CacheEngineKey], sources: list[MemoryObj]) -> None:
        """Returns when all of them are in files."""
        left = len(keys)
        lock, done = threading.Lock(), threading.Event()

        def count(key: CacheEngineKey) -> None:
            nonlocal left
            with lock:
                left -= 1
                if not left:
                    done.set()

        self._backend.batched_submit_put_task(keys, sources, on_complete_callback=count)
        if not done.wait(_TIMEOUT_S):
            raise RuntimeError("a write was not finished")


def _key(part: int, slot: int) -> CacheEngineKey:
    return CacheEngineKey("bench", 1, 0, part << 32 | slot, torch.bfloat16)


@contextlib.contextmanager
def start(blocks: Blocks) -> Iterator[LMCacheDiskPeer]:
    round_gb = blocks.payload_bytes * len(blocks.sources) / (1 << 30)
    config = LMCacheEngineConfig.from_defaults(
        local_cpu=False,
        max_local_cpu_size=_CPU_ROUNDS * round_gb + 0.25,
        local_disk=sys.argv[3],
        max_local_disk_size=2 * (_ROUNDS + 1) * round_gb + 0.25,
        extra_config={"use_odirect": True, "disk_io_threads": _THREADS},
    )
    shape = (1, 2, 16, 1, blocks.payload_bytes // 64 or 1)
    metadata = LMCacheMetadata("bench", 1, 1, 0, 0, torch.bfloat16, shape)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        cpu = LocalCPUBackend(config, metadata, dst_device="cpu")
        with contextlib.closing(LocalDiskBackend(config, loop, cpu, dst_device="cpu")) as backend:
            yield LMCacheDiskPeer(blocks, backend, cpu)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(start)
