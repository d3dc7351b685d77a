"""Which modules a block passes: `python tools/routes.py [--json]`, in a checkout whose packages are installed.

A cache pool and an engine's cache run in this process, over a Unix socket; the engine's tiers are not in a process of
their own, so that all can be watched. A module counts if one of its functions was called between the question and its
answer. What a connector adds in front of the directory is not part of it.
"""

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from kvtier.build.engine_cache import EngineCache, engine_cache
from kvtier.config import parse_config, token_sha256
from kvtier.device.kv import HostMemoryKV
from kvtier.identity.keys import BlockHasher, BlockKey, PrefixHasher, tenant_id
from kvtier.offload import Hierarchy
from kvtier.testing.blocks import TINY_NAMESPACE
from kvtier_pool.service import PoolService

NUM_BLOCKS, BLOCK_BYTES = 8, 4096
TOKEN = "token-of-a-measurement-of-routes"
PATIENCE_S = 20.0
_OF_THE_POOL = ("kvtier_pool", "kvtier.store")


class Watch:
    """Modules whose functions are called while it is on, by thread. Threads must be started after `install`."""

    def __init__(self) -> None:
        self.is_on = False
        self._modules: dict[int, set[str]] = {}

    def install(self) -> None:
        """Watches this thread, and all that are started from now on."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def take(self) -> tuple[set[str], set[str]]:
        """The modules on the engine's side and on the pool's since the last call. A thread is the pool's if it came
        through the pool's own modules."""
        engine: set[str] = set()
        pool: set[str] = set()
        for found in list(self._modules.values()):
            (pool if any(name.startswith(_OF_THE_POOL) for name in found) else engine).update(found)
        self._modules = {}
        return engine, pool

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.is_on and event == "call":
            name = frame.f_globals.get("__name__", "")
            if name.startswith("kvtier"):
                self._modules.setdefault(threading.get_ident(), set()).add(name)


@contextmanager
def pool(folder: Path) -> Iterator[str]:
    """A pool in this process; gives its Unix address."""
    config = parse_config(
        {
            "tenants": {"red": {"token_sha256": [token_sha256(TOKEN)]}},
            "pool_service": {
                "memory_bytes": "64MiB",
                "listen": f"unix:{folder}/pool.sock",
                "grpc_listen": "127.0.0.1:0",
                "http_listen": "127.0.0.1:0",
            },
        },
        source="routes",
        environ={},
    )
    service = PoolService(config)
    service.start()
    try:
        yield f"unix:{folder}/pool.sock"
    finally:
        service.stop()


@contextmanager
def cache(folder: Path, address: str, device: np.ndarray[Any, Any]) -> Iterator[EngineCache]:
    """An engine's cache over the pool, with its tiers in this process."""
    config = parse_config(
        {
            "tenant": "red",
            "tenants": {"red": {"secret": "env:SECRET", "token": "env:TOKEN"}},
            "host": {"capacity_bytes": "1MiB"},
            "cache": {"io_process": False},
            "pool": {"address": address},
        },
        source="routes",
        folder=folder,
        environ={"SECRET": "s" * 32, "TOKEN": TOKEN},
    )
    with engine_cache(
        config, device=HostMemoryKV(device), namespace=TINY_NAMESPACE, registry=CollectorRegistry()
    ) as made:
        yield made


def until(hierarchy: Hierarchy, condition: Callable[[], Any]) -> Any:
    """Waits for what is not None.

    :raises TimeoutError: it did not come.
    """
    for _ in range(int(PATIENCE_S / 0.02)):
        if (found := condition()) is not None:
            return found
        hierarchy.wait(0.02)
    raise TimeoutError(f"no answer in {PATIENCE_S} s")


def routes() -> dict[str, list[str]]:
    """The modules of a lookup and of a load that the pool answers, by side."""
    watch = Watch()
    watch.install()
    device = np.random.default_rng(0).integers(0, 256, (2 * NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    hasher = BlockHasher(tenant_id("red"), PrefixHasher(b"s" * 32, "", 1))
    keys: list[BlockKey] = hasher.hash_blocks(np.arange(NUM_BLOCKS, dtype=np.int32))
    with tempfile.TemporaryDirectory() as name, pool(Path(name)) as address:
        with cache(Path(name), address, device) as writer:
            saved = writer.hierarchy.start_save([(key, i) for i, key in enumerate(keys)])
            until(writer.hierarchy, lambda: next((r for r in writer.hierarchy.poll() if r.job_id == saved), None))
        with cache(Path(name), address, device) as reader:
            found: dict[str, list[str]] = {}
            for _ in range(2):  # the first one connects
                watch.take()
                watch.is_on = True
                ticket = reader.hierarchy.start_lookup(keys)
                until(reader.hierarchy, partial(reader.hierarchy.poll_lookup, ticket))
                watch.is_on = False
                found["lookup, engine"], found["lookup, pool"] = map(sorted, watch.take())
            watch.is_on = True
            job = reader.hierarchy.start_load([(key, NUM_BLOCKS + i) for i, key in enumerate(keys)])
            until(reader.hierarchy, lambda: next((r for r in reader.hierarchy.poll() if r.job_id == job), None))
            watch.is_on = False
            found["load, engine"], found["load, pool"] = map(sorted, watch.take())
        if not np.array_equal(device[:NUM_BLOCKS], device[NUM_BLOCKS:]):
            raise AssertionError("the blocks that were loaded are not those that were saved")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    found = routes()
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    for name, modules in found.items():
        print(f"{name}: {len(modules)} modules\n  {' '.join(modules)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
