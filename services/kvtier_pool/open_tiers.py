"""The tiers below the pool's memory, as configured."""

import threading
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from kvtier.codec.sealed_form import StorageSeals
from kvtier.codec.stored_form import Codec
from kvtier.config import Config
from kvtier.config.pool_service import PoolServiceConfig
from kvtier.errors import ClosedError, ConfigError
from kvtier.metrics import Metrics
from kvtier.store.event_hub import EventHub
from kvtier.store.lower_tiers import LowerTier
from kvtier.store.write_behind import WriteBehindSettings
from kvtier.store.write_workers import WriteParts
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.common.write_policy import WritePolicy
from kvtier.tiers.disk.medium.direct_io import DirectIo
from kvtier.tiers.disk.state.segment_files import SyncPolicy
from kvtier.tiers.disk.tier import DiskTier
from kvtier_pool.admissions import tier_admission

if TYPE_CHECKING:
    from kvtier.tiers.redis import RedisSettings, RedisTier

_WRITE_DOWN_SHARE = 1 / 4
"""The share of memory that may wait for a tier below and is pinned meanwhile, of a tenant that is alone; of all tenants
together, twice as much (`kvtier.store.fair_room`). Less: writers hear THROTTLED above a disk that keeps what is
acknowledged, and bursts do not get to another tier. More: memory has room for little else while it catches up."""
_REDIS_FAILURES, _REDIS_OPEN_S = 3, 2.0
"""Failures in a row after which a Redis is left alone, and for how long; then one call probes it."""


def open_lower_tiers(
    config: Config, seals: StorageSeals, hub: EventHub, metrics: Metrics, parts: WriteParts
) -> list[LowerTier]:
    """The tiers below memory, from the fastest to the slowest; the caller closes them.

    :param seals: the tenants whose blocks are sealed, as it is at each block.
    :param parts: when blocks are written down, and how many at a time.
    :raises ConfigError: the disk folder cannot be used, the Redis address is none, its password cannot be read, or it
        cannot have its admission. A Redis that does not answer is no error: it misses until
        it does.
    """
    table = config.pool_service
    below: list[LowerTier] = []
    with ExitStack() as undo:
        if table.disk_dir is not None:
            disk = DiskTier.open(
                config.references.path(table.disk_dir),
                int(table.disk_bytes),
                reserve_bytes=int(table.disk_reserve_bytes),
                on_event=hub.publish,
                metrics=metrics,
                codec=Codec.parse(table.disk_codec),
                seals=seals,
                segment_bytes=int(table.disk_segment_bytes),
                sync=SyncPolicy(table.disk_sync),
                direct_io=DirectIo(table.disk_direct_io),
                timeout_s=table.disk_timeout_s,
            )
            undo.callback(disk.close)
            policy = WritePolicy(table.disk_write_policy)
            keeps = policy is WritePolicy.WRITE_THROUGH
            admission = tier_admission("disk_admission", table.disk_admission, int(table.disk_bytes))
            below.append(LowerTier(disk, _settings(policy, table, parts, keeps_acknowledged=keeps), admission))
        if table.redis_url:  # empty: none, so that an environment can take it away
            redis = _redis_tier(table.redis_url, config, seals, metrics)
            undo.callback(redis.close)
            settings = _settings(WritePolicy(table.redis_write_policy), table, parts, keeps_acknowledged=False)
            admission = tier_admission("redis_admission", table.redis_admission, None)
            below.append(LowerTier(redis, settings, admission, redis.set_caps, redis.purge, redis.problem))
            threading.Thread(target=_ask_ahead, args=(redis,), name="kvtier-redis-ahead", daemon=True).start()
        undo.pop_all()
    return below


def _ask_ahead(redis: "RedisTier") -> None:
    """Has the log tell of a Redis that does not answer when the pool starts, not when the first block comes."""
    with suppress(ClosedError):
        for _ in range(_REDIS_FAILURES):
            if redis.answers():
                return


def _redis_tier(url: str, config: Config, seals: StorageSeals, metrics: Metrics) -> "RedisTier":
    # Imported here: a pool without Redis starts a tenth of a second sooner.
    from kvtier.tiers.redis import RedisTier

    settings = redis_settings(config, seals)
    try:
        return RedisTier(url, settings, metrics=metrics, breaker=CircuitBreaker(_REDIS_FAILURES, _REDIS_OPEN_S))
    except ConfigError as error:
        raise ConfigError(f"redis_url: {error}") from error


def redis_settings(config: Config, seals: StorageSeals) -> "RedisSettings":
    """What the configuration says of the pool's Redis. Raises `ConfigError` where its password cannot be read."""
    from kvtier.tiers.redis import RedisSettings

    table = config.pool_service
    return RedisSettings(
        username=table.redis_username,
        password=config.redis_password(),
        newest_password=lambda: config.redis_password() or "",
        ttl_s=table.redis_ttl_s,
        codec=Codec.parse(table.redis_codec),
        seals=seals,
        call_timeout_s=table.redis_timeout_s,
        lookup_timeout_s=table.redis_lookup_timeout_s,
        connect_timeout_s=min(1.0, table.redis_timeout_s),
    )


def _settings(
    policy: WritePolicy, table: PoolServiceConfig, parts: WriteParts, *, keeps_acknowledged: bool
) -> WriteBehindSettings:
    return WriteBehindSettings(
        policy=policy,
        keeps_acknowledged=keeps_acknowledged,
        selective_uses=table.selective_uses,
        queue_bytes=int(table.memory_bytes * _WRITE_DOWN_SHARE),
        parts=parts,
    )
