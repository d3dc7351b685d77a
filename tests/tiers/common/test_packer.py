"""What tiers count of what they pack."""

import pytest

from kvtier.codec.checksums import checksum
from kvtier.codec.stored_form import Codec, encode
from kvtier.metrics import Metrics
from kvtier.testing.blocks import make_key, make_packable_payload, make_payload
from kvtier.tiers.common.packer import BlockPacker

NBYTES = 256 << 10


def counted(metrics: Metrics, codec: Codec) -> list[float | None]:
    """Bytes before the codec, and behind it."""
    labels = {"tier": "disk", "codec": codec.label}
    value = metrics.registry.get_sample_value
    return [value("kvtier_codec_bytes_total", labels | {"form": form}) for form in ("raw", "stored")]


@pytest.mark.parametrize("codec", Codec)
def test_blocks_are_packed_and_counted(codec: Codec) -> None:
    metrics, key, payload = Metrics(), make_key("block"), make_packable_payload("block", NBYTES)
    packer = BlockPacker(codec, tier="disk", metrics=metrics)
    header, stored = packer.encode(key, payload, checksum(key, payload))
    assert (header, bytes(stored)) == encode(key, payload, checksum(key, payload), codec)
    assert packer.encode(key, payload, checksum(key, payload)) == (header, stored)
    assert counted(metrics, codec) == [2 * NBYTES, 2 * len(stored)]


@pytest.mark.parametrize("codec", Codec)
def test_blocks_that_do_not_pack_stay_raw(codec: Codec) -> None:
    metrics, key, payload = Metrics(), make_key("noise"), make_payload("noise", NBYTES)
    packer = BlockPacker(codec, tier="disk", metrics=metrics)
    assert packer.encode(key, payload, checksum(key, payload))[1] is payload
    assert counted(metrics, Codec.RAW) == [NBYTES, NBYTES]
