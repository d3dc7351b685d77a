"""Tenants with storage keys on a real disk: none of theirs can be read there, and what was meddled with is missed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from disk_rig import flip, killed, opened, place_of
from disk_tier_rig import NBYTES, Open, block, load, loaded, reopening, value
from kvtier.codec.sealed_form import NO_SEALS, StorageSeals
from kvtier.codec.stored_form import Codec
from kvtier.metrics import Metrics
from kvtier.testing.blocks import make_key, make_packable_payload, make_payload, read_blocks, summed
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.disk.operations.survey import survey
from seal_rig import BLUE, KEYS, RED, seals, unopened

LABELS = range(20)


@pytest.fixture
def opening(tmp_path: Path) -> Iterator[Open]:
    with reopening(tmp_path) as opened:
        yield opened


def write_all(opening: Open, seals: StorageSeals, **options: object) -> None:
    tier = opening(seals=seals, **options)
    assert tier.write([block(label) for label in LABELS]) == [WriteStatus.STORED] * len(LABELS)
    assert all(loaded(tier, LABELS))


def files(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.iterdir()))


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_sealed_blocks_come_back_and_are_not_in_the_files(
    tmp_path: Path, opening: Open, codec: Codec, direct_io: str
) -> None:
    payload = make_packable_payload("kv", NBYTES)
    for sealed in (seals(1), NO_SEALS):
        tier = opening(seals=sealed, codec=codec, direct_io=direct_io)
        tier.discard([make_key("kv")])
        assert tier.write([summed(make_key("kv"), payload)]) == [WriteStatus.STORED]
        tier = opening(seals=sealed, codec=codec, direct_io=direct_io)
        assert load(tier, "kv") == payload
        if sealed is not NO_SEALS:
            assert not any(payload[at : at + 16] in files(tmp_path) for at in range(0, NBYTES, 500))
        elif codec is Codec.RAW:
            assert payload[500:516] in files(tmp_path), "or this test looks for nothing"


def test_other_tenants_are_as_they_were(tmp_path: Path, opening: Open) -> None:
    tier = opening(seals=seals(1, tenant=RED))
    blocks = [summed(make_key("kv", tenant=tenant), make_payload(tenant, NBYTES)) for tenant in (RED, BLUE)]
    assert tier.write(blocks) == [WriteStatus.STORED] * 2
    assert read_blocks(tier, [key for key, _, _ in blocks], NBYTES) == [payload for _, payload, _ in blocks]
    assert blocks[1][1] in files(tmp_path)
    assert blocks[0][1] not in files(tmp_path)


def test_a_new_key_seals_and_the_old_one_goes_on_opening(opening: Open) -> None:
    metrics = Metrics()
    write_all(opening, seals(1))
    tier = opening(seals=seals(1, 2), metrics=metrics)
    assert tier.write([block("new")]) == [WriteStatus.STORED]
    assert all(loaded(tier, [*LABELS, "new"]))
    tier = opening(seals=seals(2), metrics=metrics)
    assert loaded(tier, [0, "new"]) == [False, True]
    assert unopened(metrics, "disk") == {"unknown_key": 1}
    assert tier.lookup([make_key(0)]) == [Status.MISS], "so it is stored again"
    assert tier.write([block(0)]) == [WriteStatus.STORED]
    assert load(tier, 0) is not None


@pytest.mark.parametrize("other", [seals(3), seals(1, tenant=BLUE), NO_SEALS], ids=["id", "tenant", "none"])
def test_without_its_key_a_block_is_a_miss_counted_and_logged(
    opening: Open, other: StorageSeals, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    write_all(opening, seals(1))
    assert not any(loaded(opening(seals=other, metrics=metrics), LABELS))
    assert unopened(metrics, "disk") == {"unknown_key": len(LABELS)}
    assert value(metrics, "kvtier_corrupt_blocks_total") == len(LABELS)
    assert len([record for record in caplog.records if "cannot be opened" in record.message]) == 1


def test_a_wrong_key_of_the_same_id_is_a_miss(opening: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    write_all(opening, seals(1))
    monkeypatch.setitem(KEYS, 1, bytes(32))
    assert not any(loaded(opening(seals=seals(1), metrics=metrics), LABELS))
    assert unopened(metrics, "disk") == {"altered": len(LABELS)}


def test_blocks_of_before_are_read_only_if_that_is_wanted(opening: Open) -> None:
    metrics = Metrics()
    write_all(opening, NO_SEALS)
    assert all(loaded(opening(seals=seals(1, reads_plain=True)), LABELS))
    tier = opening(seals=seals(1), metrics=metrics)
    assert not any(loaded(tier, LABELS))
    assert unopened(metrics, "disk") == {"plain": len(LABELS)}
    assert tier.write([block(0)]) == [WriteStatus.STORED], "sealed this time"
    assert load(tier, 0) is not None


REGIONS = {"random": 5, "masked checksum": 26, "ciphertext": 5000, "tag": NBYTES + 32 + 7}


@pytest.mark.parametrize("at", REGIONS.values(), ids=REGIONS)
def test_a_flipped_bit_is_a_miss(tmp_path: Path, opening: Open, at: int) -> None:
    metrics = Metrics()
    tier = opening(seals=seals(1))
    tier.write([block(0)])
    path, offset, _ = place_of(tmp_path, make_key(0))
    flip(path, offset + at)
    tier = opening(seals=seals(1), metrics=metrics)
    assert load(tier, 0) is None
    assert value(metrics, "kvtier_corrupt_blocks_total") == 1
    assert unopened(metrics, "disk") == {}, "an accident, by its checksum"
    assert tier.write([block(0)]) == [WriteStatus.STORED]


def test_fsck_needs_no_key(tmp_path: Path) -> None:
    with opened(tmp_path, seals=seals(1)) as tier:
        tier.write([block(label) for label in LABELS])
    assert survey(tmp_path, verify=True).is_sound
    path, offset, _ = place_of(tmp_path, make_key(3))
    flip(path, offset + 100)
    assert not survey(tmp_path, verify=True).is_sound


def test_sealed_blocks_outlive_a_killed_process(tmp_path: Path) -> None:
    """Without a footer every payload is verified, for which no key is needed."""
    with opened(tmp_path / "disk", seals=seals(1)) as tier:
        tier.write([block(label) for label in LABELS])
        copy = killed(tmp_path / "disk", tmp_path / "copy")
    with opened(copy, seals=seals(1, 2)) as tier:
        assert all(loaded(tier, LABELS))


def test_sealed_blocks_that_were_read_are_moved(tmp_path: Path) -> None:
    with opened(tmp_path, seals=seals(1), segment_bytes=2**20) as tier:
        for label in range(600):
            tier.write([block(label)])
            assert load(tier, 0) == make_payload(0, NBYTES)
        assert not loaded(tier, [1])[0]
