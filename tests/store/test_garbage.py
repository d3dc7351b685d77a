"""Blocks whose bytes do not match their checksum, in a pool's memory: they stay so wherever they go."""

from pathlib import Path

import pytest

from kvtier.codec.stored_form import encode_header, parse_header
from kvtier.testing.contract import make_key, make_payload
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.common.write_policy import WritePolicy
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.host.slots import WriteSlot
from pool_rig import BLOCK_BYTES, MIB, RED, WAIT_S, CoreRig, core_rig, keys, payloads, until


def far_tier(folder: Path) -> DiskTier:
    """Stands for a Redis: keeps the stored form."""
    return DiskTier.open(folder / "far", 64 * MIB, name="redis", reserve_bytes=0)


def commit_garbage(rig: CoreRig, label: object) -> None:
    """As a client does that writes through shared memory and is broken: memory takes its checksum on trust."""
    header = parse_header(encode_header(make_key(label), make_payload(label, BLOCK_BYTES)))
    slot = rig.core.begin_write(RED, header.key, header.stored_length)
    assert isinstance(slot, WriteSlot)
    slot.view[:] = make_payload(("half of", label), BLOCK_BYTES)
    rig.core._memory.commit(slot, header.checksum)
    rig.core._below.entered([slot.key])


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
def test_what_does_not_match_its_checksum_is_a_miss_below_and_can_be_written_again(
    tmp_path: Path, policy: WritePolicy
) -> None:
    good = [("good", label) for label in range(4)]
    with core_rig(tmp_path / "disk", remote=far_tier(tmp_path), policy=policy) as rig:
        for label in range(4):
            commit_garbage(rig, label)
            rig.store(("good", label))
        rig.core.drain(WAIT_S)
    with core_rig(tmp_path / "disk", remote=far_tier(tmp_path)) as rig:  # memory has nothing any more
        assert rig.load(keys(range(4))) == [None] * 4
        assert rig.core.lookup(keys(range(4))) == [Status.MISS] * 4, "each tier has dropped what it found out"
        assert rig.load(keys(good)) == payloads(good)
        assert rig.store(0) is WriteStatus.STORED
        assert rig.load(keys([0])) == payloads([0])


def test_garbage_does_not_make_a_disk_look_broken(tmp_path: Path) -> None:
    with core_rig(tmp_path, queue_bytes=2 * BLOCK_BYTES) as rig:
        for label in range(5):
            commit_garbage(rig, label)
            until(lambda: rig.count("kvtier_pool_write_down_queue_bytes", tier="disk") == 0)
        rig.files.may_write.clear()
        statuses = [rig.store(("good", label)) for label in range(4)]
        assert statuses == [WriteStatus.STORED] * 2 + [WriteStatus.THROTTLED] * 2
