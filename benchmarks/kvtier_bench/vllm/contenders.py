"""What `kvtier bench vllm` compares: engines, what each forgets before a question, and what proves where its hits are
from."""

import contextlib
import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.errors import KvtierError
from kvtier.protocol.block import Verb
from kvtier_bench.measuring.blocks import TENANT
from kvtier_bench.processes.pool_process import PoolProcess

BLOCK = 32
"""Tokens in a block; on the CPU, vLLM wants multiples of 32."""
SECRET_ENVIRON = "BENCH_SECRET"
TOKEN_ENVIRON = "BENCH_TOKEN"
_HOST_BYTES = 512 << 20
_ON_DEVICE = "vllm:prompt_tokens_cached_by_source:device"
_OFFERED = "vllm:external_prefix_cache_hits"
_LOADED = "vllm:kvtier_loaded_blocks"
_FAILED = "vllm:kvtier_failed_blocks"
_NATIVE_HITS = "vllm:kv_offload_tiering_chunk_hits"
_WATCHED = (
    _ON_DEVICE,
    _OFFERED,
    _FAILED,
    *(f"{_LOADED}:{tier}" for tier in ("host", "disk", "pool")),
    *(f"{_NATIVE_HITS}:{tier}" for tier in ("0:primary", "1:fs")),
)
"""Counters that tell where hits are from. None but the expected ones may move."""


class Forgets(enum.Enum):
    """What an engine forgets before each question."""

    NOTHING = enum.auto()
    DEVICE = enum.auto()
    """vLLM's own prefix cache."""
    MEMORY = enum.auto()
    """The engine forgets vLLM's own prefix cache, and what the connector holds in this engine's memory."""


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine with one way to keep KV."""

    name: str
    forgets: Forgets
    counter: str | None = None
    """The name of the counter, of vLLM or the connector, that a hit moves."""
    per_block: int = 1
    """The amount by which a hit moves `counter` for each block."""
    reads_pool_by: Verb | None = None
    """The verb that brings its blocks from the pool."""
    transfer: Mapping[str, Any] | None = None
    """What users give as `--kv-transfer-config`; None: no connector."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of vLLM's `LLM`, besides those that all contenders have."""
    peer: str | None = None
    """The environment of `make peers` that has its packages."""

    def require_hits(
        self, num_blocks: int, before: Mapping[str, float], after: Mapping[str, float], pool_verbs: set[str]
    ) -> None:
        """Raises `KvtierError` when a question's hits are not from where they should be.

        :param num_blocks: of the prefix.
        :param before: the engine's counters.
        :param pool_verbs: what the pool was asked for meanwhile.
        """
        moved = {name: after.get(name, 0) - before.get(name, 0) for name in _WATCHED}
        hits = {name: int(amount) for name, amount in moved.items() if amount}
        expected: dict[str, int] = {}
        if self.counter is not None:
            expected[self.counter] = num_blocks * self.per_block
        if self.transfer is not None:
            expected[_OFFERED] = num_blocks * BLOCK
        by = pool_verbs & {Verb.ACQUIRE.value, Verb.READ.value}
        expected_by = set() if self.reads_pool_by is None else {self.reads_pool_by.value}
        expected = {name: amount for name, amount in expected.items() if amount}
        if hits != expected or by != expected_by:
            raise KvtierError(
                f"{self.name}: hits are {hits}, from the pool by {sorted(by)}; expected {expected} and "
                f"{sorted(expected_by)}: the figures would mean nothing"
            )


NO_CACHE, OWN_HIT = "no cache", "vLLM's own hit"
HOST, POOL, POOL_TCP = "kvtier host", "kvtier pool, same host", "kvtier pool, TCP"
NATIVE_HOST, NATIVE_FS = "vLLM tiers, host", "vLLM tiers, fs"
EXAMPLE, LMCACHE = "ExampleConnector", "LMCache"


def contenders(pool: PoolProcess, folder: Path) -> list[Contender]:
    """Returns all contenders.

    :param folder: for what they store.
    """
    no_caching = {"enable_prefix_caching": False}
    native = _native(folder / "fs")
    same_host_verb = Verb.ACQUIRE if pool.shared_memory else Verb.READ
    return [
        Contender(NO_CACHE, Forgets.NOTHING, options=no_caching),
        Contender(OWN_HIT, Forgets.NOTHING, _ON_DEVICE, BLOCK),
        Contender(HOST, Forgets.DEVICE, f"{_LOADED}:host", transfer=kvtier()),
        Contender(POOL, Forgets.MEMORY, f"{_LOADED}:pool", 1, same_host_verb, kvtier(pool.unix)),
        Contender(POOL_TCP, Forgets.MEMORY, f"{_LOADED}:pool", 1, Verb.READ, kvtier(pool.tcp)),
        Contender(NATIVE_HOST, Forgets.DEVICE, f"{_NATIVE_HITS}:0:primary", transfer=_native(folder / "fs-behind")),
        Contender(NATIVE_FS, Forgets.MEMORY, f"{_NATIVE_HITS}:1:fs", transfer=native),
        Contender(EXAMPLE, Forgets.DEVICE, transfer=_example(folder / "example")),
        Contender(LMCACHE, Forgets.DEVICE, transfer=_lmcache(), peer="lmcache"),
    ]


def kvtier(*addresses: str) -> dict[str, Any]:
    """Host memory, and the pool at these addresses."""
    extra: dict[str, Any] = {
        "tenant": TENANT,
        "tenants": {TENANT: {"secret": f"env:{SECRET_ENVIRON}", "token": f"env:{TOKEN_ENVIRON}"}},
        "host": {"capacity_bytes": _HOST_BYTES},
    }
    if addresses:
        extra["pool"] = {"address": list(addresses)}
    return _transfer(
        "KvtierConnector", extra, kv_connector_module_path="kvtier_vllm", kv_load_failure_policy="recompute"
    )


def _native(folder: Path) -> dict[str, Any]:
    return _transfer(
        "OffloadingConnector",
        {
            "spec_name": "HostTieringSpec",
            "spec_module_path": "kvtier_bench.vllm.native_tiering",
            "cpu_bytes_to_use": _HOST_BYTES,
            "secondary_tiers": [{"type": "fs", "root_dir": str(folder)}],
        },
        engine_id=f"{folder.parent.name}-{folder.name}",
    )


@contextlib.contextmanager
def shared_memory_removed(folder: Path) -> Iterator[None]:
    """Afterwards the memory of vLLM's tiers is gone, which an engine that is killed leaves behind.

    :param folder: that of `contenders`; its name is in that memory's.
    """
    try:
        yield
    finally:
        for path in Path("/dev/shm").glob(f"vllm_offload_{folder.name}-*"):
            path.unlink(missing_ok=True)


def _example(folder: Path) -> dict[str, Any]:
    return _transfer("ExampleConnector", {"shared_storage_path": str(folder)})


def _lmcache() -> dict[str, Any]:
    return _transfer("LMCacheConnectorV1", {})


def _transfer(connector: str, extra: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    return {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": dict(extra), **others}


def named(known: Sequence[Contender], names: Sequence[str]) -> list[Contender]:
    """Returns the contenders of these names; all if none is named. Raises `KvtierError` for a name that nobody has."""
    unknown = sorted(set(names) - {contender.name for contender in known})
    if unknown:
        raise KvtierError(f"--only {unknown[0]!r}: known are {', '.join(repr(each.name) for each in known)}")
    return [each for each in known if not names or each.name in names]
