"""A writer's checksum on its way down: computed once, and nothing that changes later ever gets another one."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import xxhash

from kvtier.codec import checksums, stored_form
from kvtier.codec.stored_form import Codec, encode_header, parse_header
from kvtier.memory.buffers import ReadableBuffer
from kvtier.metrics import Metrics
from kvtier.testing.blocks import make_key, make_packable_payload, read_blocks, summed
from kvtier.tiers.base import Item, Status, Tier, WriteStatus
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.host.slots import WriteSlot
from kvtier.tiers.redis import RedisSettings, RedisTier
from pool_rig import BLOCK_BYTES, MIB, RED, WAIT_S, CoreRig, core_rig
from redis_rig import running_redis
from wrapped_tier import WrappedTier

KEY = make_key("block")
PAYLOAD = make_packable_payload("block", BLOCK_BYTES)
MakeTier = Callable[[Codec, Metrics], Tier]


class Changing(WrappedTier):
    """Somebody else writes to the block in the last moment before the tier looks at it."""

    def __init__(self, inner: Tier, change: Callable[[], None]) -> None:
        super().__init__(inner)
        self.change = change

    def write(self, items: Sequence[Item[ReadableBuffer]]) -> list[WriteStatus]:
        self.change()
        return super().write(items)


@pytest.fixture(params=["disk", "redis"])
def make_tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeTier]:
    """Opens the same medium each time."""
    if request.param == "disk":
        yield lambda codec, metrics: DiskTier.open(
            tmp_path / "far", 64 * MIB, name="redis", reserve_bytes=0, codec=codec, metrics=metrics
        )
        return
    with running_redis(tmp_path) as server:
        yield lambda codec, metrics: RedisTier(
            server.url,
            RedisSettings(codec=codec, call_timeout_s=WAIT_S),
            metrics=metrics,
            breaker=CircuitBreaker(5, 1.0),
        )


def commit(rig: CoreRig) -> WriteSlot:
    """As a client does through shared memory, who keeps the slot mapped."""
    header = parse_header(encode_header(KEY, PAYLOAD))
    slot = rig.core.begin_write(RED, KEY, BLOCK_BYTES)
    assert isinstance(slot, WriteSlot)
    slot.view[:] = PAYLOAD
    assert rig.core.commit_all([slot], [header.checksum]) == [WriteStatus.STORED]
    return slot


@pytest.mark.parametrize("codec", list(Codec))
def test_what_changed_after_its_commit_is_never_a_block_below(make_tier: MakeTier, codec: Codec) -> None:
    slots: list[WriteSlot] = []
    metrics = Metrics()

    def change() -> None:
        while not slots:
            pass
        slots[0].view[BLOCK_BYTES // 2] ^= 1

    with core_rig(remote=Changing(make_tier(codec, metrics), change)) as rig:
        slots.append(commit(rig))
        (report,) = rig.core.drain(WAIT_S)
        assert (report.num_abandoned, report.num_memory_only) == (0, 0)
    tier = make_tier(Codec.RAW, metrics)
    assert read_blocks(tier, [KEY], BLOCK_BYTES) == [None]
    assert tier.lookup([KEY]) == [Status.MISS], "it was dropped when it was found out"
    assert metrics.registry.get_sample_value("kvtier_corrupt_blocks_total", {"tier": "redis"}) == 1
    assert tier.write([summed(KEY, PAYLOAD)]) == [WriteStatus.STORED]
    assert read_blocks(tier, [KEY], BLOCK_BYTES) == [PAYLOAD]
    tier.close()


def test_a_block_is_summed_once_on_its_way_to_disk_and_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []

    class Counted:
        """The hash of `xxhash`, with a note of every payload, or part of one, that it reads."""

        def __init__(self, start: bytes = b"") -> None:
            self._inner = xxhash.xxh3_64(start)

        def update(self, data: bytes) -> None:
            passes.append(len(data))
            self._inner.update(data)

        def intdigest(self) -> int:
            return self._inner.intdigest()

    counting = SimpleNamespace(xxh3_64=Counted, xxh3_64_intdigest=xxhash.xxh3_64_intdigest)
    monkeypatch.setattr(checksums, "xxhash", counting)
    monkeypatch.setattr(stored_form, "xxhash", counting)
    with running_redis(tmp_path) as server:
        far = RedisTier(
            server.url, RedisSettings(call_timeout_s=WAIT_S), metrics=Metrics(), breaker=CircuitBreaker(5, 1.0)
        )
        with core_rig(tmp_path / "disk", remote=far) as rig:
            header = parse_header(encode_header(KEY, PAYLOAD))
            passes.clear()  # that was the writer's
            slot = rig.core.begin_write(RED, KEY, BLOCK_BYTES)
            assert isinstance(slot, WriteSlot)
            slot.view[:] = PAYLOAD
            assert rig.core.commit_write(slot, header) is WriteStatus.STORED
            rig.core.drain(WAIT_S)
            stored = "kvtier_pool_written_down_blocks_total"
            assert [rig.count(stored, tier=tier, result="stored") for tier in ("disk", "redis")] == [1, 1]
            assert sum(passes) == BLOCK_BYTES, "when it arrived"
    disk = DiskTier.open(tmp_path / "disk", 64 * MIB, reserve_bytes=0)
    assert read_blocks(disk, [KEY], BLOCK_BYTES) == [PAYLOAD]
    disk.close()
