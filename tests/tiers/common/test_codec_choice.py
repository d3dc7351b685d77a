"""`codec = "auto"`: what a tier measures, and which codec it comes to."""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvtier.codec.stored_form import Codec, encode
from kvtier.errors import InvalidInputError
from kvtier.metrics import Metrics
from kvtier.testing.blocks import make_key, make_packable_payload, make_payload, read_blocks
from kvtier.tiers.base import WriteStatus
from kvtier.tiers.common import codec_choice
from kvtier.tiers.common.codec_choice import CodecChoice, parse_codec
from kvtier.tiers.disk.medium.files import OsFiles
from kvtier.tiers.disk.tier import DiskTier

MIB = 1 << 20
NBYTES = 256 << 10
RECORDED = {Codec.RAW: (24.6, 12.0, 1.0), Codec.LZ4: (1.51, 2.99, 1.28), Codec.PLANES_ZSTD: (0.4, 1.5, 1.45)}
"""GB/s in and out, and how much to 1 a block packs: of `kvtier bench codec` on a server."""
BLOCK = make_packable_payload("block", NBYTES)
KEY = make_key("block")


class Bench:
    """A choice whose clock goes on by what codecs and medium would take, and by nothing else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, codec: Codec | None = None) -> None:
        self.now = 100.0
        self.num_encoded = 0
        self.metrics = Metrics()
        self.choice = CodecChoice(
            codec, tier="disk", metrics=self.metrics, clock=self._clock, processor_clock=self._clock
        )
        self._headers = {codec: encode(KEY, BLOCK, codec)[0] for codec in Codec}
        monkeypatch.setattr(codec_choice, "encode", self._encode)
        monkeypatch.setattr(codec_choice, "verify", self._verify)
        monkeypatch.setattr(codec_choice, "unpack", lambda *_: None)

    def _clock(self) -> float:
        return self.now

    def _encode(self, _key: object, payload: bytes, codec: Codec) -> tuple[bytes, bytes]:
        self.num_encoded += 1
        self.now += len(payload) / RECORDED[codec][0] / 1e9
        return self._headers[codec], bytes(int(len(payload) / RECORDED[codec][2]))

    def _verify(self, header: object, _key: object, _stored: bytes) -> None:
        self.now += NBYTES / RECORDED[header.codec][1] / 1e9  # type: ignore[attr-defined]

    def run(self, num_blocks: int, gb_per_s: float, *, num_reads: int = 0, seconds: float = 0.0) -> Codec:
        """Writes blocks over a medium of this speed, reads each some times; the codec that it has come to."""
        for _ in range(num_blocks):
            _, stored = self.choice.encode(KEY, BLOCK)
            self.choice.wrote(len(stored), len(stored) / gb_per_s / 1e9)
            for _ in range(num_reads):
                self.choice.read(len(stored), len(stored) / gb_per_s / 1e9)
            self.now += seconds / num_blocks
        return self.choice.codec

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, {"tier": "disk", **labels}) or 0.0


@pytest.mark.parametrize(
    ("gb_per_s", "num_reads", "expected"),
    [
        (10.0, 1, Codec.RAW),  # memory
        (3.0, 4, Codec.RAW),  # a fast drive
        (0.5, 0, Codec.RAW),
        (0.12, 0, Codec.LZ4),  # 1 Gbit/s
        (0.02, 0, Codec.PLANES_ZSTD),
        (0.12, 8, Codec.PLANES_ZSTD),  # what is read often may take longer to write
        (0.4, 0, Codec.RAW),
        (0.4, 50, Codec.LZ4),
    ],
)
def test_the_codec_that_costs_least(
    monkeypatch: pytest.MonkeyPatch, gb_per_s: float, num_reads: int, expected: Codec
) -> None:
    assert Bench(monkeypatch).run(100, gb_per_s, num_reads=num_reads, seconds=130) is expected


def test_raw_until_there_is_enough_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    assert bench.run(15, 0.02) is Codec.RAW, "less than 4 MiB have been written"
    assert bench.run(1, 0.02) is Codec.PLANES_ZSTD


def test_a_fixed_codec_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, Codec.LZ4)
    assert bench.run(100, 10.0, num_reads=1, seconds=1000) is Codec.LZ4
    assert bench.num_encoded == 100
    assert bench.count("kvtier_codec_choices_total", codec="lz4") == 0


def test_it_measures_few_blocks_and_a_few_again_every_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.run(200, 10.0)
    first = 8 * 3 + 3  # every codec's first use is not timed
    assert bench.num_encoded == 200 + first
    bench.now += 61
    bench.run(200, 10.0)
    assert bench.num_encoded == 400 + first + 4 * 3
    assert bench.count("kvtier_codec_choices_total", codec="raw") == 2


def test_a_medium_that_changes_gets_another_codec(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench(monkeypatch)
    assert bench.run(100, 10.0, seconds=70) is Codec.RAW
    assert bench.run(600, 0.02, seconds=200) is Codec.PLANES_ZSTD
    assert bench.run(2000, 10.0, seconds=400) is Codec.RAW
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("tier disk: codec planes-zstd from now on; seconds per GB: raw ")
    assert lines[-1].startswith("tier disk: codec raw from now on"), "perhaps by way of lz4"
    assert len(lines) <= 3


def test_near_a_tie_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Around the speed at which lz4 begins to gain, on either side of it again and again."""
    tie = 0.33
    raw = Bench(monkeypatch)
    assert {raw.run(400, tie * wobble, seconds=130) for wobble in (0.95, 1.05) * 4} == {Codec.RAW}
    monkeypatch.undo()
    packing = Bench(monkeypatch)
    assert packing.run(400, 0.12, seconds=130) is Codec.LZ4
    assert {packing.run(400, tie * wobble, seconds=130) for wobble in (0.95, 1.05) * 4} == {Codec.LZ4}


def test_latency_is_not_taken_for_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.run(20, 10.0)
    for _ in range(1000):
        bench.choice.wrote(4096, 0.01)
        bench.choice.read(4096, 0.01)
    bench.now += 61
    assert bench.run(20, 10.0) is Codec.RAW


def test_blocks_that_do_not_pack_stay_raw() -> None:
    metrics = Metrics()
    choice = CodecChoice(None, tier="disk", metrics=metrics)
    for number in range(40):
        _, stored = choice.encode(make_key(number), make_payload(number, NBYTES))
        choice.wrote(len(stored), 0.05)
    assert choice.codec is Codec.RAW
    value = metrics.registry.get_sample_value
    labels = {"tier": "disk", "codec": "raw"}
    assert value("kvtier_codec_bytes_total", labels | {"form": "stored"}) == 40 * NBYTES
    assert value("kvtier_codec_bytes_total", labels | {"form": "raw"}) == 40 * NBYTES


def test_many_threads_measure_together_as_many_blocks_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    with ThreadPoolExecutor(8) as executor:
        list(executor.map(lambda _: bench.run(1, 0.02), range(200)))
    assert bench.choice.codec is Codec.PLANES_ZSTD
    assert 200 + 8 * 3 < bench.num_encoded <= 200 + 8 * 3 + 8 * 3


def test_a_block_that_changes_while_it_is_tried_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one in memory that a client of a pool can write to: it is his block, but others are written beside it."""
    payload = bytearray(BLOCK)

    def changing(*arguments: Any) -> Any:
        encoded = encode(*arguments)
        payload[0] ^= 1
        return encoded

    monkeypatch.setattr(codec_choice, "encode", changing)
    choice = CodecChoice(None, tier="disk", metrics=Metrics())
    for _ in range(9):
        choice.encode(KEY, payload)
    choice.wrote(4 * MIB, 1000.0)
    assert choice.codec in (Codec.LZ4, Codec.PLANES_ZSTD), "it was measured"


def test_labels() -> None:
    assert [parse_codec(label) for label in ("raw", "lz4", "planes-zstd", "auto")] == [*Codec, None]
    with pytest.raises(InvalidInputError, match="planes-zstd"):
        parse_codec("zip")


class SlowFiles(OsFiles):
    """A drive that takes and gives 40 MB/s."""

    def __init__(self) -> None:
        super().__init__(direct=False)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        time.sleep(sum(map(len, buffers)) / 40e6)
        super().write(fd, buffers, offset)


def test_codecs_as_fast_as_they_are_here_do_not_gain_over_memory() -> None:
    choice = CodecChoice(None, tier="disk", metrics=Metrics())
    for number in range(40):
        _, stored = choice.encode(make_key(number), make_packable_payload(number, NBYTES))
        choice.wrote(len(stored), len(stored) / 10e9)
        assert choice.codec is Codec.RAW


def test_a_slow_drive_gets_a_codec(tmp_path: Path) -> None:
    """For real: codecs and drive take the time that they take."""
    metrics = Metrics()
    tier = DiskTier.open(
        tmp_path / "disk", 64 * MIB, reserve_bytes=0, codec=None, files=SlowFiles(), metrics=metrics, num_threads=1
    )
    try:
        blocks = {make_key(number): make_packable_payload(number, NBYTES) for number in range(24)}
        for start in range(0, 24, 4):
            batch = list(blocks.items())[start : start + 4]
            assert tier.write(batch) == [WriteStatus.STORED] * 4
        assert read_blocks(tier, list(blocks), NBYTES) == list(blocks.values()), "of whatever codec"
    finally:
        tier.close()
    packed = {
        codec: metrics.registry.get_sample_value(
            "kvtier_codec_bytes_total", {"tier": "disk", "codec": codec.label, "form": "raw"}
        )
        for codec in Codec
    }
    assert sum(nbytes or 0 for nbytes in packed.values()) == 24 * NBYTES
    assert packed[Codec.LZ4] or packed[Codec.PLANES_ZSTD]
