"""Sealed blocks: what was sealed is opened, and nothing else is."""

import hmac
import struct
import sys

import hypothesis.strategies as st
import numpy as np
import pytest
import xxhash
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import example, given

from codec_rig import like_bf16
from kvtier.codec import sealing
from kvtier.codec.checksums import checksum
from kvtier.codec.sealed_form import open_into, seal
from kvtier.codec.sealing import SEAL_BYTES, Purpose, SealingKeys, parse_keys
from kvtier.codec.stored_form import (
    HEADER_BYTES,
    HEADER_DTYPE,
    Codec,
    parse_header,
    parse_stored_header,
    unpack,
    verify,
    well_formed,
)
from kvtier.errors import ConfigError, CorruptBlockError, SealedBlockError, SealFault
from kvtier.identity.keys import StoreKey
from kvtier.testing.blocks import make_payload
from seal_rig import BLUE, KEYS, RED, key_of, storage_keys

KEY, OTHER = key_of(RED, "a"), key_of(RED, "b")
SEALING = storage_keys(1)
PAYLOAD = like_bf16(300)

GOLDEN = (
    "4b56544202000001edffbbe14de80b6021870359901ff95e000000000000000000000000000000000001020304050607"
    "08090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f0e000000010000003e0000000000000070ec01aa41cfe898"
    "000102030405060708090a0b0c0d0e0f1011121314151617b0a1537318163a27436a166ba539604ca815a339e116dca5"
    "98b6500c0387ef8748092ab76ce1"
)


def sealed(payload: bytes = PAYLOAD, codec: Codec = Codec.RAW, keys: SealingKeys = SEALING) -> bytes:
    header, stored = seal(KEY, payload, checksum(KEY, payload), codec, keys)
    return header + bytes(stored)


def opened(block: bytes, key: StoreKey = KEY, keys: SealingKeys = SEALING) -> bytes:
    header = parse_stored_header(block)
    into = bytearray(b"\xa5" * header.raw_length)
    open_into(header, key, block[HEADER_BYTES:], memoryview(into), keys)
    return bytes(into)


def resummed(block: bytes) -> bytes:
    """As an attacker would leave it: its checksum, which anybody can compute, is right."""
    sum_ = xxhash.xxh3_64_intdigest(block[:88] + block[HEADER_BYTES:])
    return block[:88] + struct.pack("<Q", sum_) + block[HEADER_BYTES:]


def fault_of(block: bytes, key: StoreKey = KEY, keys: SealingKeys = SEALING) -> SealFault:
    with pytest.raises(SealedBlockError) as error:
        opened(block, key, keys)
    return error.value.fault


@example(like_bf16(559), Codec.LZ4)
@given(st.one_of(st.binary(max_size=300), st.integers(0, 2000).map(like_bf16)), st.sampled_from(Codec))
def test_what_was_sealed_is_opened(payload: bytes, codec: Codec) -> None:
    block = sealed(payload, codec)
    header = parse_stored_header(block)
    assert (header.key, header.key_id, header.raw_length) == (KEY, 1, len(payload))
    verify(header, KEY, block[HEADER_BYTES:])
    assert opened(block) == payload
    assert well_formed(np.frombuffer(block[:HEADER_BYTES], HEADER_DTYPE)).all()
    raw_bytes = HEADER_BYTES + len(payload) + SEAL_BYTES
    if header.codec is Codec.RAW:
        assert len(block) == raw_bytes
    else:
        assert len(block) < raw_bytes, "packed blocks are smaller, if by fewer bytes than a seal has"


def test_no_two_are_alike_and_none_shows_anything() -> None:
    blocks = [sealed() for _ in range(20)]
    assert len({block[88:] for block in blocks}) == 20
    for block in blocks:
        assert PAYLOAD[:32] not in block
        assert struct.pack("<Q", checksum(KEY, PAYLOAD)) not in block, "it tells whether a guess is right"


def test_the_form_is_what_the_page_says() -> None:
    block = sealed()
    random, masked, rest = block[96:120], block[120:128], block[128:]
    material = hmac.digest(KEYS[1], b"kvtier.storage.v1" + RED + struct.pack("<I", 1) + random, "sha512")
    (mask,) = struct.unpack("<Q", material[44:52])
    assert struct.unpack("<Q", masked)[0] ^ mask == checksum(KEY, PAYLOAD)
    assert AESGCM(material[:32]).decrypt(material[32:44], rest, block[:88] + masked) == PAYLOAD
    lengths = struct.pack("<IIII", len(PAYLOAD), 1, len(PAYLOAD) + 48, 0)
    assert block[:88] == b"KVTB" + struct.pack("<HBB", 2, 0, 1) + KEY + lengths
    assert struct.unpack("<Q", block[88:96])[0] == xxhash.xxh3_64_intdigest(block[:88] + block[96:])


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("forged", [False, True])
def test_every_bit_counts(codec: Codec, forged: bool) -> None:
    whole = sealed(like_bf16(100), codec)
    for bit in range(8 * len(whole)):
        if 88 * 8 <= bit < 96 * 8:
            continue  # the checksum, which is for those who have no key
        block = bytearray(whole)
        block[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptBlockError):
            opened(resummed(bytes(block)) if forged else bytes(block))


def test_a_block_cut_short_or_made_longer_is_not_opened() -> None:
    whole = sealed()
    for length in (*range(HEADER_BYTES, HEADER_BYTES + 60), len(whole) - 1):
        with pytest.raises(CorruptBlockError):
            opened(whole[:length])
    with pytest.raises(CorruptBlockError):
        opened(whole + b"\0")


def test_a_block_in_anothers_place_is_not_opened() -> None:
    block = sealed()
    with pytest.raises(CorruptBlockError, match="another key"):
        opened(block, OTHER)
    moved = resummed(block[:8] + OTHER + block[72:])
    verify(parse_stored_header(moved), OTHER, moved[HEADER_BYTES:])
    assert fault_of(moved, OTHER) is SealFault.ALTERED


def test_tenants_with_one_secret_do_not_open_each_others() -> None:
    theirs = key_of(BLUE, "a")
    moved = resummed(sealed()[:8] + theirs + sealed()[72:])
    assert fault_of(moved, theirs, storage_keys(1, tenant=BLUE)) is SealFault.ALTERED
    assert fault_of(sealed(), keys=storage_keys(1, tenant=BLUE)) is SealFault.ALTERED


def test_keys_for_another_purpose_do_not_open() -> None:
    assert fault_of(sealed(), keys=SealingKeys(Purpose.CARRIAGE, RED, {1: KEYS[1]})) is SealFault.ALTERED


def test_the_wrong_key_does_not_open() -> None:
    assert fault_of(sealed(), keys=SealingKeys(Purpose.STORAGE, RED, {1: bytes(32)})) is SealFault.ALTERED


def test_the_newest_key_seals_and_all_open() -> None:
    old, both, new = storage_keys(1), storage_keys(1, 2), storage_keys(2)
    before, after = sealed(keys=old), sealed(keys=both)
    assert parse_stored_header(after).key_id == 2
    assert opened(before, keys=both) == opened(after, keys=both) == opened(after, keys=new) == PAYLOAD
    assert fault_of(before, keys=new) is SealFault.UNKNOWN_KEY
    assert fault_of(after, keys=old) is SealFault.NEWER_KEY


def test_an_accident_is_told_from_a_key_that_is_missing() -> None:
    block = bytearray(sealed())
    block[200] ^= 1
    with pytest.raises(CorruptBlockError, match="checksum") as error:
        opened(bytes(block), keys=storage_keys(2))
    assert not isinstance(error.value, SealedBlockError)


@pytest.mark.parametrize("codec", Codec)
def test_bytes_that_changed_after_they_were_summed_are_never_read(codec: Codec) -> None:
    header, stored = seal(KEY, PAYLOAD, checksum(KEY, PAYLOAD) ^ 1, codec, SEALING)
    with pytest.raises(CorruptBlockError, match="before they were sealed"):
        opened(header + bytes(stored))


def test_a_sealed_block_does_not_travel() -> None:
    with pytest.raises(CorruptBlockError, match="sealed with key 1"):
        parse_header(sealed())
    block = sealed()
    with pytest.raises(CorruptBlockError, match="sealed with key 1"):
        unpack(parse_stored_header(block), block[HEADER_BYTES:], memoryview(bytearray(len(PAYLOAD))))


def test_a_golden_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changing it takes another version: what lies on disks would be forgotten."""
    monkeypatch.setattr(sealing.os, "urandom", lambda nbytes: bytes(range(nbytes)))
    key = StoreKey(RED + bytes(16) + bytes(range(32)))
    header, stored = seal(key, b"golden payload", checksum(key, b"golden payload"), Codec.RAW, SEALING)
    assert (header + bytes(stored)).hex() == GOLDEN


def test_keys_are_not_shown() -> None:
    assert repr(storage_keys(1, 3)) == "SealingKeys(ids=[1, 3])"


def test_keys_are_parsed() -> None:
    assert parse_keys(f"1:{'00' * 32}\n 12:{'Ff' * 32}\n") == {1: bytes(32), 12: b"\xff" * 32}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "openssl rand"),
        ("00" * 32, "entry 1 is no ID:KEY"),
        ("1:00", "entry 1 is no ID:KEY"),
        (f"1:{'00' * 32} 2:{'zz' * 32}", "entry 2 is no ID:KEY"),
        (f"0:{'00' * 32}", "entry 1 is no ID:KEY"),
        (f"256:{'00' * 32}", "entry 1 is no ID:KEY"),
        (f"1:{'00' * 32} 1:{'11' * 32}", "entry 2 has the id of another, 1"),
    ],
)
def test_what_are_no_keys_is_refused_without_telling_them(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as error:
        parse_keys(text)
    assert "zz" not in str(error.value)
    assert "0000" not in str(error.value)


@pytest.mark.parametrize("keys", [{}, {1: bytes(16)}, {0: bytes(32)}, {256: bytes(32)}])
def test_keys_that_cannot_be_any_are_refused(keys: dict[int, bytes]) -> None:
    with pytest.raises(ConfigError, match="32 bytes"):
        SealingKeys(Purpose.STORAGE, RED, keys)


def test_without_cryptography_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(ConfigError, match=r"pip install '.\[seal\]'"):
        storage_keys(1)


def test_payloads_are_sealed_alike_in_any_buffer() -> None:
    payload = make_payload("x", 5000)
    for wrapped in (bytearray(payload), memoryview(payload), np.frombuffer(payload, np.uint8).data):
        header, stored = seal(KEY, wrapped, checksum(KEY, payload), Codec.RAW, SEALING)
        assert opened(header + bytes(stored)) == payload
