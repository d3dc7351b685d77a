"""The tiers below the pool's memory, as the settings ask for them."""

from contextlib import ExitStack

from kvtier.codec.stored_form import Codec
from kvtier.errors import ConfigError
from kvtier.metrics import Metrics
from kvtier.store.event_hub import EventHub
from kvtier.store.lower_tiers import LowerTier
from kvtier.store.write_behind import WriteBehindSettings
from kvtier.tiers.base import Tier
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.common.metered import Metered
from kvtier.tiers.common.write_policy import WritePolicy
from kvtier.tiers.disk.medium.direct_io import DirectIo
from kvtier.tiers.disk.state.segment_files import SyncPolicy
from kvtier.tiers.disk.tier import DiskTier
from kvtier_pool.settings import PoolSettings, RedisSettings

_WRITE_DOWN_SHARE = 1 / 4
"""The share of memory that may wait for a tier below and is pinned meanwhile. Less: writers hear THROTTLED above a disk
that keeps what is acknowledged, and bursts do not get to another tier. More: memory has room for little else while it
catches up."""
_REDIS_FAILURES, _REDIS_OPEN_S = 3, 2.0
"""Failures in a row after which a Redis is left alone, and for how long; then one call probes it."""


def open_lower_tiers(settings: PoolSettings, hub: EventHub, metrics: Metrics) -> list[LowerTier]:
    """The tiers below memory, from the fastest to the slowest; the caller closes them.

    :raises ConfigError: the disk folder cannot be used, or the Redis address is none. A Redis that does not
        answer is no error: it misses until it does.
    """
    below: list[LowerTier] = []
    with ExitStack() as undo:
        if settings.disk_dir is not None:
            disk = DiskTier.open(
                settings.disk_dir,
                settings.disk_bytes,
                reserve_bytes=settings.disk_reserve_bytes,
                on_event=hub.publish,
                metrics=metrics,
                codec=Codec.parse(settings.disk_codec),
                segment_bytes=settings.disk_segment_bytes,
                sync=SyncPolicy(settings.disk_sync),
                direct_io=DirectIo(settings.disk_direct_io),
            )
            undo.callback(disk.close)
            keeps = settings.disk_write_policy is WritePolicy.WRITE_THROUGH
            below.append(_lower(disk, settings.disk_write_policy, settings, keeps_acknowledged=keeps))
        if settings.redis is not None:
            redis = Metered(_redis_tier(settings.redis, metrics), metrics)
            below.append(_lower(redis, settings.redis.write_policy, settings, keeps_acknowledged=False))
        undo.pop_all()
    return below


def _redis_tier(redis: RedisSettings, metrics: Metrics) -> Tier:
    # Imported here: a pool without Redis starts a tenth of a second sooner.
    from kvtier.tiers.redis import RedisTier

    try:
        return RedisTier(
            redis.url,
            username=redis.username,
            password=redis.password,
            ttl_s=redis.ttl_s,
            codec=Codec.parse(redis.codec),
            metrics=metrics,
            breaker=CircuitBreaker(_REDIS_FAILURES, _REDIS_OPEN_S),
            call_timeout_s=redis.timeout_s,
            lookup_timeout_s=redis.lookup_timeout_s,
            connect_timeout_s=min(1.0, redis.timeout_s),
        )
    except ConfigError as error:
        raise ConfigError(f"redis_url: {error}") from error


def _lower(tier: Tier, policy: WritePolicy, settings: PoolSettings, *, keeps_acknowledged: bool) -> LowerTier:
    return LowerTier(
        tier,
        WriteBehindSettings(
            policy=policy,
            keeps_acknowledged=keeps_acknowledged,
            selective_uses=settings.selective_uses,
            queue_bytes=int(settings.memory_bytes * _WRITE_DOWN_SHARE),
        ),
    )
