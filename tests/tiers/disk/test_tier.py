"""The disk tier's promises on a medium that works: the contract, codecs, direct access, events, an end without rests.

Its room, its threads, its folder, failing media and the log beneath have files of their own: `test_disk_*.py`.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from disk_rig import place_of
from disk_tier_rig import KIB, MIB, NBYTES, Open, block, loaded, reopening
from kvtier.codec.stored_form import HEADER_BYTES, Codec, header_from_checksum, parse_stored_header
from kvtier.errors import InvalidInputError
from kvtier.events import Event, EventKind
from kvtier.identity.keys import StoreKey
from kvtier.testing.blocks import make_packable_payload, summed
from kvtier.testing.contract import MakeTier, TierContract, make_key, make_payload, read_blocks, tier_state_machine
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.disk.medium.files import OsFiles, supports_direct
from kvtier.tiers.disk.state.segment_files import SyncPolicy
from kvtier.tiers.disk.tier import DiskTier


@pytest.fixture
def open_disk(tmp_path: Path) -> Iterator[Open]:
    with reopening(tmp_path / "disk") as open_one:
        yield open_one


class TestDisk(TierContract):
    persistent = True

    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> MakeTier:
        return lambda capacity_bytes: DiskTier.open(tmp_path / "disk", capacity_bytes, reserve_bytes=0)


class TestBufferedDisk(TierContract):
    persistent = True
    payload_bytes = 7003

    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> MakeTier:
        files = OsFiles(direct=False)
        return lambda capacity_bytes: DiskTier.open(tmp_path / "disk", capacity_bytes, reserve_bytes=0, files=files)


class TestPackingDisk(TierContract):
    persistent = True
    packs = True

    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> MakeTier:
        return lambda capacity_bytes: DiskTier.open(tmp_path / "disk", capacity_bytes, reserve_bytes=0, codec=Codec.LZ4)


class TestSyncedDisk(TierContract):
    persistent = True

    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> MakeTier:
        return lambda capacity_bytes: DiskTier.open(
            tmp_path / "disk", capacity_bytes, reserve_bytes=0, sync=SyncPolicy.BATCH
        )


def test_direct_access_is_used_where_the_file_system_has_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
        expected = True
    except OSError:
        expected = False
    path.unlink()
    assert supports_direct(str(tmp_path)) == expected
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("codec", Codec)
def test_states_against_a_dict(tmp_path: Path, codec: Codec) -> None:
    machine = tier_state_machine(
        lambda capacity_bytes: DiskTier.open(tmp_path / "disk", capacity_bytes, reserve_bytes=0, codec=codec),
        packable=True,
        persistent=True,
        max_examples=20,
    )
    machine.TestCase().runTest()


def header_of(folder: Path, label: object) -> bytes:
    """The last that stands in its segment."""
    path, _, _ = place_of(folder, make_key(label))
    data = path.read_bytes()
    return data[data.rindex(make_key(label)) - 8 :][:HEADER_BYTES]


class TestCodec:
    def test_a_packed_block_takes_less(self, tmp_path: Path, open_disk: Open) -> None:
        tier = open_disk(codec=Codec.LZ4)
        key, payload = make_key("packed"), make_packable_payload("packed", 64 * 1024)
        tier.write([summed(key, payload), block("noise")])
        assert read_blocks(tier, [key], len(payload)) == [payload]
        assert place_of(tmp_path / "disk", key)[2] < 48 * 1024
        assert parse_stored_header(header_of(tmp_path / "disk", "packed")).codec is Codec.LZ4
        assert parse_stored_header(header_of(tmp_path / "disk", "noise")).codec is Codec.RAW, "it gains nothing"

    def test_a_folder_of_both_is_read_whatever_is_written(self, open_disk: Open) -> None:
        payloads = {make_key(codec): make_packable_payload(codec, NBYTES) for codec in Codec}
        for codec, item in zip(Codec, payloads.items(), strict=True):
            assert open_disk(codec=codec).write([summed(*item)]) == [WriteStatus.STORED]
        for codec in Codec:
            assert read_blocks(open_disk(codec=codec), list(payloads), NBYTES) == list(payloads.values())

    def test_to_a_release_that_does_not_know_a_codec_its_blocks_are_not_there(
        self, open_disk: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        payloads = {make_key(codec): make_packable_payload(codec, NBYTES) for codec in Codec}
        for codec, item in zip(Codec, payloads.items(), strict=True):
            assert open_disk(codec=codec).write([summed(*item)]) == [WriteStatus.STORED]
        monkeypatch.setattr("kvtier.codec.stored_form._CODECS", {Codec.RAW, Codec.LZ4})
        older = open_disk()
        *known, unknown = payloads
        assert older.lookup([*known, unknown]) == [Status.HIT, Status.HIT, Status.MISS]
        assert read_blocks(older, [*known, unknown], NBYTES) == [*(payloads[key] for key in known), None]
        assert older.write([summed(unknown, payloads[unknown])]) == [WriteStatus.STORED]
        older.check()


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.PLANES_ZSTD])
def test_to_a_release_that_knows_version_1_only_packed_blocks_are_not_there(
    open_disk: Open, monkeypatch: pytest.MonkeyPatch, codec: Codec
) -> None:
    raw, packed = (summed(make_key(label), make_packable_payload(label, NBYTES)) for label in ("raw", "packed"))
    assert open_disk().write([raw]) == [WriteStatus.STORED]
    assert open_disk(codec=codec).write([packed]) == [WriteStatus.STORED]
    monkeypatch.setattr("kvtier.codec.stored_form._VERSIONS", frozenset({1}))
    older = open_disk()
    assert older.lookup([raw[0], packed[0]]) == [Status.HIT, Status.MISS]
    assert read_blocks(older, [raw[0], packed[0]], NBYTES) == [raw[1], None]
    assert older.write([packed]) == [WriteStatus.STORED]
    older.check()


def test_sealed_blocks_are_not_there(open_disk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a later release may have written them."""
    sealed, plain = (summed(make_key(label), make_payload(label, NBYTES)) for label in ("sealed", "plain"))

    def seal(key: StoreKey, payload: bytes, checksum: int, codec: Codec) -> tuple[bytes, bytes]:
        header = bytearray(header_from_checksum(key, len(payload), checksum))
        header[4:8], header[76:80] = b"\x02\x00\x00\x01", b"\x07\x00\x00\x00"
        return bytes(header), payload

    tier = open_disk()
    assert tier.write([plain]) == [WriteStatus.STORED]
    with monkeypatch.context() as patch:
        patch.setattr("kvtier.tiers.common.packer.encode", seal)
        assert tier.write([sealed]) == [WriteStatus.STORED]
    tier = open_disk()
    assert tier.lookup([sealed[0], plain[0]]) == [Status.MISS, Status.HIT]
    assert tier.write([sealed]) == [WriteStatus.STORED]
    assert read_blocks(tier, [sealed[0]], NBYTES) == [sealed[1]]


def test_neighbours_are_read_at_once(tmp_path: Path, open_disk: Open) -> None:
    num_reads = 0

    class Counting(OsFiles):
        def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            nonlocal num_reads
            num_reads += 1
            return super().read(fd, buffers, offset)

    tier = open_disk(files=Counting(direct=False))
    tier.write([block(i) for i in range(4)])
    assert read_blocks(tier, [make_key(i) for i in (3, 1, 0, 2)], NBYTES) == [block(i)[1] for i in (3, 1, 0, 2)]
    assert num_reads == 1


def test_events_follow_the_changes(open_disk: Open) -> None:
    events: list[Event] = []
    tier = open_disk(on_event=events.append)
    a, b, c = (make_key(label) for label in "abc")
    tier.write([block("a"), block("b")])
    tier.write([block("c")])
    tier.discard([a, make_key("absent")])
    assert events == [
        Event(EventKind.STORED, "disk", (a, b)),
        Event(EventKind.STORED, "disk", (c,)),
        Event(EventKind.REMOVED, "disk", (a,)),
    ]
    events.clear()
    open_disk(on_event=events.append)
    assert [(event.kind, set(event.keys)) for event in events] == [(EventKind.STORED, {b, c})]


def test_events_tell_what_is_there_whatever_is_evicted_and_moved(open_disk: Open) -> None:
    there: set[StoreKey] = set()

    def note(event: Event) -> None:
        (there.update if event.kind is EventKind.STORED else there.difference_update)(event.keys)

    tier = open_disk(MIB, segment_bytes=64 * KIB, on_event=note)
    for i in range(200):
        tier.write([block(i)])
        loaded(tier, range(max(0, i - 30), i, 3))
    assert there == {make_key(i) for i in range(200) if tier.lookup([make_key(i)]) == [Status.HIT]}
    there.clear()
    tier = open_disk(MIB // 2, on_event=note)
    assert there == {make_key(i) for i in range(200) if tier.lookup([make_key(i)]) == [Status.HIT]}
    assert 0 < len(there) < MIB // 2 // NBYTES


def test_a_payload_that_cannot_be_copied_gives_its_claim_back(open_disk: Open) -> None:
    tier = open_disk()
    strided = memoryview(bytes(2 * NBYTES))[::2]
    with pytest.raises(BufferError):
        tier.write([block("a"), (make_key("b"), strided, 0)])
    assert tier.lookup([make_key("a"), make_key("b")]) == [Status.HIT, Status.MISS]
    tier.check()


@pytest.mark.parametrize("payload", [None, memoryview(bytes(NBYTES)).cast("f"), memoryview(bytes(4)).cast("i", [])])
def test_a_payload_that_is_no_bytes_costs_nothing_else(open_disk: Open, payload: Any) -> None:
    """Not the blocks beside it, nor room that is another's, nor its key, which can be written after."""
    tier = open_disk(files=OsFiles(direct=False))
    with pytest.raises((BufferError, TypeError)):
        tier.write([block("a"), (make_key("b"), payload, 0), block("c")])
    assert tier.lookup([make_key(label) for label in "abc"]) == [Status.HIT, Status.MISS, Status.HIT]
    assert tier.write([block(label) for label in "abc"]) == [WriteStatus.EXISTS, WriteStatus.STORED, WriteStatus.EXISTS]
    assert loaded(tier, "abc") == [True] * 3


def test_nothing_is_left_open_after_close(tmp_path: Path) -> None:
    def descriptors() -> set[str]:
        return {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)}

    def _is_open(fd: str) -> bool:
        return os.path.lexists(f"/proc/self/fd/{fd}")

    for sync in SyncPolicy:
        tier = DiskTier.open(tmp_path / "disk", MIB, reserve_bytes=0, sync=sync)
        tier.write([block((sync, i)) for i in range(40)])
        tier.close()
    assert not [path for path in descriptors() if path.startswith(str(tmp_path))]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvtier-disk")]


@pytest.mark.parametrize(
    ("capacity_bytes", "options"),
    [(0, {}), (MIB, {"num_threads": 0}), (MIB, {"segment_bytes": 4096}), (MIB, {"write_amplification": 0.9})],
)
def test_sizes_that_hold_nothing_are_refused(tmp_path: Path, capacity_bytes: int, options: dict[str, float]) -> None:
    with pytest.raises(InvalidInputError):
        DiskTier.open(tmp_path, capacity_bytes, **options)
