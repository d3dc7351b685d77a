"""A disk that fails now and then while a disk tier forgets: whatever is killed when, nothing forgotten comes back."""

import errno
import random
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from disk_log_rig import BLUE, KIB
from disk_rig import flip, killed, opened, segments
from kvtier.identity.keys import StoreKey
from kvtier.testing.blocks import TENANT, make_key, make_payload, read_blocks, summed
from kvtier.testing.faults import FaultyFiles
from kvtier.tiers.base import Status
from kvtier.tiers.disk.medium.files import OsFiles
from kvtier.tiers.disk.tier import DiskTier

CAPACITY_BYTES = 512 * KIB
KEYS = [make_key(label, tenant=tenant) for label in range(60) for tenant in (TENANT, BLUE)]
FAULTS = [("write", errno.EIO), ("truncate", errno.EIO), ("remove", errno.EIO), ("create", errno.ENOSPC)]


def found(tier: DiskTier, keys: Iterable[StoreKey]) -> list[StoreKey]:
    return [key for key in keys if tier.lookup([key]) != [Status.MISS]]


@pytest.mark.parametrize("footers", ["sound", "damaged"])
@pytest.mark.parametrize("seed", [1, 2])
def test_what_was_forgotten_stays_so(tmp_path: Path, seed: int, footers: str) -> None:
    order, forgotten = random.Random(seed), set[StoreKey]()
    folder, files = tmp_path / "disk", FaultyFiles(OsFiles(direct=False), seed=seed)
    num_found = 0
    for _ in range(4):
        with opened(folder, CAPACITY_BYTES, files=files, segment_bytes=32 * KIB, num_threads=1) as tier:
            for step in range(60):
                if order.random() < 0.15:
                    files.fail_next(*order.choice(FAULTS))
                keys, op = order.sample(KEYS, 6), order.random()
                if op < 0.55:
                    nbytes = order.choice([3000, 9000])
                    tier.write([summed(key, make_payload(key, nbytes)) for key in keys])
                    forgotten.difference_update(keys)
                elif op < 0.7:
                    read_blocks(tier, keys, 3000)
                elif op < 0.98:
                    tier.discard(keys)
                    forgotten.update(keys)
                else:
                    tenant = order.choice([TENANT, BLUE])
                    tier.purge(tenant)
                    forgotten.update(key for key in KEYS if key.startswith(tenant))
                assert not found(tier, forgotten)
                tier.check()
                if step % 6 == 0:
                    copy = killed(folder, tmp_path / "copy")
                    for path in segments(copy) if footers == "damaged" else []:
                        if path.stat().st_size:
                            flip(path, path.stat().st_size - 20)  # where its trailer is, if it has one
                    with opened(copy, CAPACITY_BYTES) as other:
                        assert not found(other, forgotten)
                        num_found += len(found(other, KEYS))
                    shutil.rmtree(copy)
    assert num_found > 200, "something was there to be found"
