"""Keys are a contract with every other process and every byte ever stored: golden vectors pin them."""

import hashlib
import hmac
import struct

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from golden_keys import CHAIN, HASHER, NAMESPACE, SECRET
from hash_seeds import outputs_by_hash_seed
from kvtier.errors import InvalidInputError
from kvtier.identity.keys import (
    CHAIN_START,
    ChainHash,
    Extra,
    NamespaceId,
    PrefixHasher,
    are_of_tenant,
    split_store_key,
    store_key,
    tenant_id,
)
from kvtier.identity.namespace import Namespace


def naive_chain(secret: bytes, salt: str, size: int, tokens: list[int], extras: dict[int, bytes]) -> list[bytes]:
    """DESIGN's formula, word for word, sharing no code with the implementation."""
    s = salt.encode("utf-8")
    root = hmac.new(secret, b"kvtier.root.v1" + struct.pack("<I", size) + struct.pack("<I", len(s)) + s, "sha256")
    parent, hashes = b"\0" * 32, []
    for i in range(len(tokens) // size):
        block = struct.pack(f"<{size}I", *tokens[i * size : (i + 1) * size])
        parent = hashlib.sha256(root.digest() + parent + block + extras.get(i, b"\0\0\0\0")).digest()
        hashes.append(parent)
    return hashes


def test_golden_chain() -> None:
    assert [h.hex() for h in CHAIN] == [
        "1f008a5e8a03323b25f8f02fef1243bb57c6e202c3cc596ae859c5a789f1e5e3",
        "f4a99f580ec402a19bc3d4192b15417ff95618985ec38e9b7ac2b132f7b6c3c3",
        "0dd3cd2e0d60edea9d4bfff20b3b9f311408fe5e80153837eec817e6453d5cb4",
    ]
    assert HASHER.external_key(b"digest").hex() == "e98e7df11869e1a465ee6395e6b61745043e9871dafe96905bedce5b7f4256c4"


def test_golden_store_key() -> None:
    assert tenant_id("red").hex() == "edffbbe14de80b6021870359901ff95e"
    assert NAMESPACE.id.hex() == "c6226c387139dd8156a1b98597905f38"
    key = store_key(tenant_id("red"), NAMESPACE.id, ChainHash(b"\7" * 32))
    assert key == tenant_id("red") + NAMESPACE.id + b"\7" * 32
    assert split_store_key(key) == (tenant_id("red"), NAMESPACE.id, b"\7" * 32)


@given(
    salt=st.text(max_size=20),
    size=st.integers(1, 9),
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=60),
    secret=st.binary(min_size=16, max_size=64),
)
def test_equals_the_formula(salt: str, size: int, tokens: list[int], secret: bytes) -> None:
    hasher = PrefixHasher(secret, salt, size)
    expected = naive_chain(secret, salt, size, tokens, {})
    assert hasher.hash_blocks(np.array(tokens, dtype=np.uint32)) == expected
    assert hasher.hash_blocks(tokens) == expected
    half = len(expected) // 2
    parent = ChainHash(expected[half - 1]) if half else CHAIN_START
    assert hasher.hash_blocks(tokens[half * size :], parent=parent) == expected[half:]


def test_extras_are_canonical() -> None:
    hasher = PrefixHasher(SECRET, "", 4)
    lora, image, late = Extra("lora", b"x", 0), Extra("mm", b"y", 0), Extra("mm", b"z", 3)
    packed = msgpack.packb([["lora", b"x", 0], ["mm", b"y", 0], ["mm", b"z", 3]])
    expected = naive_chain(SECRET, "", 4, list(range(8)), {1: struct.pack("<I", len(packed)) + packed})
    assert hasher.hash_blocks(range(8), extras={1: [late, image, lora]}) == expected
    assert hasher.hash_blocks(range(8), extras={1: []}) == naive_chain(SECRET, "", 4, list(range(8)), {})


def test_every_input_changes_the_chain() -> None:
    tokens = np.arange(16, dtype=np.int32)
    base = PrefixHasher(SECRET, "a", 8).hash_blocks(tokens)
    changed = tokens.copy()
    changed[0] = 99
    others = [
        PrefixHasher(SECRET, "b", 8).hash_blocks(tokens),
        PrefixHasher(SECRET[::-1], "a", 8).hash_blocks(tokens),
        PrefixHasher(SECRET, "a", 8).hash_blocks(changed),
        PrefixHasher(SECRET, "a", 8).hash_blocks(tokens, extras={0: [Extra("lora", b"1", 0)]}),
        [PrefixHasher(SECRET, "a", 8).external_key(h) for h in base],
    ]
    seen = set(base)
    for chain in others:
        assert seen.isdisjoint(chain)
        seen.update(chain)
    assert set(PrefixHasher(SECRET, "a", 4).hash_blocks(tokens)).isdisjoint(seen)


def test_same_in_another_process_with_another_hash_seed() -> None:
    program = (
        "import sys; from kvtier.identity.keys import PrefixHasher;"
        "print(PrefixHasher(bytes(range(32)), 'red', 4).hash_blocks(range(1, 13))[-1].hex())"
    )
    assert outputs_by_hash_seed(program) == {naive_chain(SECRET, "red", 4, list(range(1, 13)), {})[-1].hex()}


def test_every_field_changes_the_namespace() -> None:
    base = {
        "weights_digest": SECRET,
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "physical_layout": "L2NHD",
        "backend": "torch-cpu",
        "num_layers": 30,
        "num_kv_heads": 3,
        "head_dim": 64,
        "tp_size": 4,
        "tp_rank": 1,
        "pp_size": 4,
        "pp_rank": 1,
    }
    changes: dict[str, object] = {
        "weights_digest": SECRET[::-1],
        "dtype": "float16",
        "kv_dtype": "fp8_e4m3",
        "physical_layout": "2LNHD",
        "backend": "triton",
        "num_layers": 3,
        "num_kv_heads": 30,
        "head_dim": 128,
        "tp_size": 2,
        "tp_rank": 2,
        "pp_size": 2,
        "pp_rank": 2,
        "kv_group": 1,
        "lossy_codec": "int8",
        "layout_version": 2,
    }
    ids = {Namespace(**{**base, name: value}).id for name, value in changes.items()}  # type: ignore[arg-type]
    ids.add(Namespace(**base).id)  # type: ignore[arg-type]
    assert len(ids) == len(changes) + 1
    assert set(changes) == set(Namespace.__dataclass_fields__)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PrefixHasher(b"short", "", 4), "at least 16"),
        (lambda: PrefixHasher(SECRET, "", 0), "tokens_per_block 0"),
        (lambda: PrefixHasher(SECRET, "", 4).hash_blocks([-1, 2, 3, 4]), "from -1"),
        (lambda: PrefixHasher(SECRET, "", 4).hash_blocks([2**32]), str(2**32)),
        (lambda: PrefixHasher(SECRET, "", 4).hash_blocks([0.5]), "float64"),
        (lambda: PrefixHasher(SECRET, "", 4).hash_blocks([[1, 2, 3, 4]]), "one integer dimension"),
        (lambda: PrefixHasher(SECRET, "", 4).hash_blocks(range(4), extras={0: [Extra("x", b"", 4)]}), "offset 4"),
        (lambda: tenant_id("Red Team"), "Red Team"),
        (lambda: tenant_id(""), "1 to 63"),
        (lambda: store_key(tenant_id("a"), NamespaceId(b"short"), CHAIN_START), "5"),
    ],
)
def test_bad_input_names_the_thing(call: object, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        call()  # type: ignore[operator]


@pytest.mark.parametrize("num_keys", [0, 1, 63, 64, 200])
def test_one_key_of_another_tenant_is_found_among_many(num_keys: int) -> None:
    own, other = tenant_id("red"), tenant_id("blue")
    hashes = [ChainHash(i.to_bytes(32)) for i in range(num_keys)]
    keys = [store_key(own, NamespaceId(bytes(16)), chain_hash) for chain_hash in hashes]
    assert are_of_tenant(keys, own)
    for i in range(num_keys):
        assert not are_of_tenant([*keys[:i], store_key(other, NamespaceId(bytes(16)), hashes[i]), *keys[i + 1 :]], own)
