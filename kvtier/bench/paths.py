"""`kvtier bench paths`: blocks between an engine's memory and a pool process, over every path there is."""

import secrets
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import numpy as np
import typer

from kvtier.bench.report import Case, Spread, interleave, ratios, report
from kvtier.config import token_sha256
from kvtier.errors import KvtierError
from kvtier.keys import NamespaceId, PrefixHasher, StoreKey, store_key, tenant_id
from kvtier.malloc import keep_freed_memory
from kvtier.metrics import Metrics
from kvtier.processes import Service
from kvtier.tiers.base import ReadableBuffer, Status, WriteStatus
from kvtier.tiers.breaker import CircuitBreaker
from kvtier.tiers.memory import copy_bytes, map_memory
from kvtier.tiers.pool import PoolTier, PoolTransport
from kvtier.tiers.pool_grpc import GrpcTransport
from kvtier.tiers.pool_socket import SocketTransport

if TYPE_CHECKING:
    import redis as redis_py

TENANT = "bench"
_NUM_KEY_SETS = 6
"""One to read, one to write for each path."""


def bench_paths(
    json: Annotated[Path | None, typer.Option(help="Write JSON to this file; - for standard output.")] = None,
    payload_bytes: Annotated[int, typer.Option(min=64, help="Bytes per block.")] = 2 << 20,
    batch: Annotated[int, typer.Option(min=1, help="Blocks per call.")] = 64,
    redis: Annotated[
        str | None,
        typer.Option(help="URL of a Redis with room for six batches: the pool's Redis tier, and redis-py, beside."),
    ] = None,
) -> None:
    """Read and write a batch of blocks over TCP, Unix socket and gRPC, beside a memcpy of the same bytes.

    Every block has memory of its own on both sides, touched before. Reads verify every block, but for redis-py's.
    Before a write the pool is told to forget the blocks, which is a small part of the time.
    """
    keep_freed_memory()
    token = secrets.token_urlsafe(32)
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder, ExitStack() as stack:
        ready = stack.enter_context(_pool(Path(folder), token, max(64 << 20, 8 * payload_bytes * batch))).ready()
        tcp, unix = ready["block"].split(",")
        tenant = tenant_id(TENANT)
        transports: dict[str, PoolTransport] = {
            "tcp": SocketTransport(tcp, token, tenant),
            "unix": SocketTransport(unix, token, tenant),
            "grpc": GrpcTransport(ready["grpc"], token),
        }
        paths: dict[str, _Path] = {}
        for name, transport in transports.items():
            breaker = CircuitBreaker(3, 1.0)
            pool = PoolTier(transport, tenant, metrics=Metrics(), breaker=breaker, call_timeout_s=30.0)
            stack.callback(pool.close)
            paths[name] = pool
        if redis is not None:
            paths |= _redis_paths(redis, stack)
        blocks = _Blocks(payload_bytes, batch)
        cases: list[Case] = []
        for op, runs in (("read", blocks.reads(paths)), ("write", blocks.writes(paths))):
            seconds = interleave({"memcpy": blocks.copy, **runs}, label=op)
            for name in runs:
                ratio = ratios(seconds["memcpy"], seconds[name])
                median_s = Spread.of(seconds[name]).median_s
                what = f"{op} {batch} x {payload_bytes:,} B, {batch * payload_bytes / median_s / 1e9:.2f} GB/s"
                spread = f"{ratio.min_s:.2f} .. {ratio.max_s:.2f}"
                cases.append(Case(name, what, median_s * 1e6, "batch", "memcpy", ratio.median_s, spread))
    report("Paths to the pool", cases, as_json=json)


class _Path(Protocol):
    """What is measured of a `Tier`."""

    def read(self, keys: Sequence[StoreKey], into: Sequence[memoryview]) -> list[Status]: ...

    def write(self, items: Sequence[tuple[StoreKey, ReadableBuffer]]) -> list[WriteStatus]: ...

    def discard(self, keys: Sequence[StoreKey]) -> int: ...


class _Blocks:
    """A batch of random blocks, and memory to read it into."""

    def __init__(self, payload_bytes: int, batch: int) -> None:
        rng = np.random.default_rng(0)
        self._sources = [map_memory(payload_bytes, prefault=True) for _ in range(batch)]
        for source in self._sources:
            copy_bytes(source, rng.bytes(payload_bytes))
        self._into = [map_memory(payload_bytes, prefault=True) for _ in range(batch)]
        hashes = PrefixHasher(bytes(32), "", 1).hash_blocks(np.arange(_NUM_KEY_SETS * batch, dtype=np.int32))
        keys = [store_key(tenant_id(TENANT), NamespaceId(bytes(16)), h) for h in hashes]
        self._key_sets = [keys[start : start + batch] for start in range(0, len(keys), batch)]

    def copy(self) -> None:
        """The floor: what moving these bytes costs at the least."""
        for into, source in zip(self._into, self._sources, strict=True):
            copy_bytes(into, source)

    def reads(self, paths: dict[str, _Path]) -> dict[str, Callable[[], None]]:
        """Reads of blocks that the server has in memory."""
        for tier in paths.values():
            tier.discard(self._key_sets[0])
            self._write(tier, self._key_sets[0])

        def read(tier: _Path) -> None:
            if set(tier.read(self._key_sets[0], self._into)) != {Status.HIT}:
                raise KvtierError("a read missed: the figures would mean nothing")

        return {name: lambda tier=tier: read(tier) for name, tier in paths.items()}  # type: ignore[misc]

    def writes(self, paths: dict[str, _Path]) -> dict[str, Callable[[], None]]:
        """Writes under keys of each path's own, which the pool forgets in between."""
        runs: dict[str, Callable[[], None]] = {}
        for (name, tier), keys in zip(paths.items(), self._key_sets[1:], strict=False):

            def write(tier: _Path = tier, keys: list[StoreKey] = keys) -> None:
                tier.discard(keys)
                self._write(tier, keys)

            runs[name] = write
        return runs

    def _write(self, tier: _Path, keys: list[StoreKey]) -> None:
        if set(tier.write(list(zip(keys, self._sources, strict=True)))) != {WriteStatus.STORED}:
            raise KvtierError("a write was refused: the figures would mean nothing")


class _PlainRedis:
    """redis-py with hiredis as anybody would use it, pipelined. Verifies nothing."""

    def __init__(self, client: "redis_py.Redis") -> None:
        self._client = client

    def read(self, keys: Sequence[StoreKey], into: Sequence[memoryview]) -> list[Status]:
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.get(_plain(key))
        values = pipeline.execute()
        for value, buffer in zip(values, into, strict=True):
            copy_bytes(buffer, value)
        return [Status.HIT] * len(values)

    def write(self, items: Sequence[tuple[StoreKey, ReadableBuffer]]) -> list[WriteStatus]:
        pipeline = self._client.pipeline(transaction=False)
        for key, payload in items:
            pipeline.set(_plain(key), payload)
        return [WriteStatus.STORED if done else WriteStatus.FULL for done in pipeline.execute()]

    def discard(self, keys: Sequence[StoreKey]) -> int:
        return int(self._client.delete(*map(_plain, keys)))


def _plain(key: StoreKey) -> bytes:
    return b"kvtier-bench:" + key


def _redis_paths(url: str, stack: ExitStack) -> dict[str, _Path]:
    import redis as redis_py

    from kvtier.tiers.redis import RedisTier

    tier = RedisTier(url, metrics=Metrics(), breaker=CircuitBreaker(3, 1.0), call_timeout_s=30.0)
    stack.callback(tier.close)
    client = redis_py.Redis.from_url(url)
    stack.callback(client.close)
    return {"redis": tier, "redis-py": _PlainRedis(client)}


def _pool(folder: Path, token: str, memory_bytes: int) -> Service:
    config = folder / "pool.toml"
    config.write_text(
        f'[pool_service]\nlisten = ["127.0.0.1:0", "unix:{folder}/pool.sock"]\n'
        f'grpc_listen = ["127.0.0.1:0"]\nhttp_listen = "127.0.0.1:0"\nmemory_bytes = {memory_bytes}\n'
        f'[tenants.{TENANT}]\ntoken_sha256 = ["{token_sha256(token)}"]\n'
    )
    return Service(["pool", "serve", "--config", str(config)], log=folder / "pool.log", environ={})
