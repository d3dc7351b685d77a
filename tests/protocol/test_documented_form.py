"""The examples of docs/stored-form.md: what the page says of them gives them, and so does the code."""

import hashlib
import hmac
import struct

import msgpack
import pytest
import xxhash
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from document_rig import examples
from golden_keys import CHAIN, HASHER, NAMESPACE, SECRET
from kvtier.codec.sealed_form import seal
from kvtier.codec.sealing import Purpose, SealingKeys
from kvtier.codec.stored_form import Codec, decode_into, encode, encode_header, parse_stored_header
from kvtier.identity.keys import NamespaceId, StoreKey, store_key, tenant_id
from kvtier.testing.blocks import summed

PAGE = examples("stored-form.md")
KEY = StoreKey(PAGE["store key"])
PAYLOAD = b"golden payload"
PACKABLE = b"\x80\x3f" * 128


def test_the_tenant_id() -> None:
    digest = hashlib.sha256(b"kvtier.tenant.v1" + b"red").digest()
    assert PAGE["tenant id"] == digest[:16] == tenant_id("red")


def test_the_namespace_id() -> None:
    assert len(msgpack.unpackb(PAGE["namespace packed"])) == 16
    digest = hashlib.sha256(PAGE["namespace packed"]).digest()
    assert PAGE["namespace id"] == digest[:16] == NAMESPACE.id


def test_the_chain() -> None:
    assert PAGE["root"] == hmac.digest(SECRET, PAGE["root message"], "sha256")
    for i in range(2):
        assert PAGE[f"chain hash {i}"] == hashlib.sha256(PAGE[f"block {i}"]).digest() == CHAIN[i]
    external = hmac.digest(PAGE["root"], b"kvtier.ext.v1" + b"digest", "sha256")
    assert PAGE["external key of digest"] == external == HASHER.external_key(b"digest")


def test_the_store_key() -> None:
    parts = PAGE["tenant id"], NamespaceId(PAGE["namespace id"]), PAGE["chain hash 0"]
    assert b"".join(parts) == KEY == store_key(*parts)  # type: ignore[arg-type]


def test_the_raw_block() -> None:
    block = PAGE["version 1, raw"]
    assert block == encode_header(KEY, PAYLOAD) + PAYLOAD
    assert block[:88] == b"KVTB" + struct.pack("<HBB", 1, 0, 0) + KEY + struct.pack("<QQ", 14, 14)
    assert struct.unpack("<Q", block[88:96])[0] == xxhash.xxh3_64_intdigest(block[:88] + PAYLOAD, seed=0)


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.PLANES_ZSTD])
def test_the_packed_blocks(codec: Codec) -> None:
    block = PAGE[f"version 2, {codec.label}"]
    header, stored = block[:96], block[96:]
    into = bytearray(len(PACKABLE))
    decode_into(header, KEY, stored, memoryview(into))
    assert into == PACKABLE
    as_raw = b"KVTB" + struct.pack("<HBB", 1, 0, 0) + KEY + struct.pack("<QQ", 256, 256)
    lengths = struct.pack("<IIII", 256, 0, len(stored), 0)
    checksum = struct.pack("<Q", xxhash.xxh3_64_intdigest(as_raw + PACKABLE))
    assert header == b"KVTB" + struct.pack("<HBB", 2, codec, 0) + KEY + lengths + checksum
    assert stored[-8:] == struct.pack("<Q", xxhash.xxh3_64_intdigest(block[:-8]))
    written, _ = encode(*summed(KEY, PACKABLE), codec)
    assert parse_stored_header(written).codec is codec


def test_the_sealed_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.codec.sealing.os.urandom", lambda nbytes: bytes(range(nbytes)))
    keys = SealingKeys(Purpose.STORAGE, tenant_id("red"), {1: b"\1" * 32})
    header, stored = seal(*summed(KEY, PAYLOAD), Codec.RAW, keys)
    block = PAGE["version 2, sealed"]
    assert block == header + bytes(stored)
    material = hmac.digest(b"\1" * 32, b"kvtier.storage.v1" + KEY[:16] + b"\1\0\0\0" + bytes(range(24)), "sha512")
    assert AESGCM(material[:32]).decrypt(material[32:44], block[128:], block[:88] + block[120:128]) == PAYLOAD
    assert struct.unpack("<Q", block[88:96])[0] == xxhash.xxh3_64_intdigest(block[:88] + block[96:])


def test_every_example_is_run() -> None:
    keys = {"tenant id", "namespace packed", "namespace id", "store key"}
    chain = {"root message", "root", "block 0", "chain hash 0", "block 1", "chain hash 1", "external key of digest"}
    assert set(PAGE) == keys | chain | {
        "version 1, raw",
        "version 2, lz4",
        "version 2, planes-zstd",
        "version 2, sealed",
    }
