"""Keys and payloads for tests: the same for the same label, different for any two."""

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvtier.codec.checksums import checksum
from kvtier.identity.keys import ChainHash, NamespaceId, StoreKey, TenantId, store_key, tenant_id
from kvtier.identity.namespace import Namespace
from kvtier.memory.pieces import Payload
from kvtier.tiers.base import Item, Status, Tier

TENANT = tenant_id("red")
NAMESPACE = NamespaceId(b"namespace-number")
TINY_NAMESPACE = Namespace(
    weights_digest=bytes(32),
    dtype="float32",
    kv_dtype="float32",
    physical_layout="L2NHD",
    backend="test",
    num_layers=1,
    num_kv_heads=1,
    head_dim=8,
)
"""The namespace of an engine without a model."""

_FEW_EXPONENTS = bytes(0x3C | byte & 3 for byte in range(256))
"""Two random bits of eight are left."""

MakePayload = Callable[[object, int], bytes]
"""The payload of a label, so many bytes long."""
PayloadT = TypeVar("PayloadT", bound=Payload)


def make_key(label: object, *, tenant: TenantId = TENANT, namespace: NamespaceId = NAMESPACE) -> StoreKey:
    """The key of the block called `label`."""
    return store_key(tenant, namespace, ChainHash(hashlib.sha256(repr(label).encode()).digest()))


def make_payload(label: object, nbytes: int) -> bytes:
    """Bytes that no other label has, without a pattern that would hide shifted or torn copies."""
    return hashlib.shake_128(repr(label).encode()).digest(nbytes)


def make_packable_payload(label: object, nbytes: int) -> bytes:
    """Returns bytes like `make_payload`, but with few exponents, as bf16 KV has: codecs save about a third of it."""
    payload = bytearray(make_payload(label, nbytes))
    payload[1::2] = payload[1::2].translate(_FEW_EXPONENTS)
    return bytes(payload)


def payload_maker(packable: bool) -> MakePayload:
    """`make_packable_payload` or `make_payload`."""
    return make_packable_payload if packable else make_payload


def summed(key: StoreKey, payload: PayloadT) -> Item[PayloadT]:
    """A block as `Tier.write` takes it, with the checksum of these bytes."""
    return key, payload, checksum(key, payload)


def read_blocks(tier: Tier, keys: Sequence[StoreKey], nbytes: int) -> list[bytes | None]:
    """Payloads of `nbytes` each, None where the tier misses."""
    into = [memoryview(bytearray(b"\xa5" * nbytes)) for _ in keys]
    statuses = tier.read(keys, into)
    assert all(status in (Status.HIT, Status.MISS) for status in statuses)
    return [bytes(b) if s is Status.HIT else None for s, b in zip(statuses, into, strict=True)]
