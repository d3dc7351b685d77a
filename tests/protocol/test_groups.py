"""Batches as they are sent and as the pool takes them: the same keys, in an order that both know."""

import itertools

import pytest

from kvtier.errors import InvalidInputError, LimitExceededError
from kvtier.identity.keys import NUMPY_PAYS_FROM, ChainHash, NamespaceId, StoreKey, block_key, rank_keys, tenant_id
from kvtier.protocol.groups import group, group_of_rank
from kvtier.testing.blocks import make_key
from kvtier_pool.limits import PoolLimits
from kvtier_pool.requests import add_keys

RED = tenant_id("red")
COUNTS = [0, 1, 2, NUMPY_PAYS_FROM - 1, NUMPY_PAYS_FROM, NUMPY_PAYS_FROM + 1, 1000]


def received(keys: list[StoreKey], sizes: list[int] | None) -> list[tuple[StoreKey, object]]:
    """What the pool makes of them: key, and payload length if there is one, in the batch's order."""
    grouped = group(keys, sizes)
    found: list[tuple[StoreKey, object]] = []
    for fields in grouped.fields:
        of_group: list[StoreKey] = []
        namespace, hashes = fields["namespace"], fields["hashes"]
        assert isinstance(namespace, bytes)
        assert isinstance(hashes, bytes)
        add_keys(of_group, RED, namespace, hashes, PoolLimits())
        found += [(key, fields.get("payload_bytes")) for key in of_group]
    assert all(type(key) is bytes for key, _ in found)
    assert sorted(grouped.order) == list(range(len(keys)))
    return [pair for _, pair in sorted(zip(grouped.order, found, strict=True))]


@pytest.mark.parametrize("num_keys", COUNTS)
@pytest.mark.parametrize("num_namespaces", [1, 2])
@pytest.mark.parametrize("lengths", [None, [7], [7, 9]], ids=["no lengths", "one length", "two lengths"])
def test_the_pool_receives_what_was_meant(num_keys: int, num_namespaces: int, lengths: list[int] | None) -> None:
    namespaces = [NamespaceId(bytes([n]) * 16) for n in range(num_namespaces)]
    turns = itertools.islice(itertools.cycle(namespaces), num_keys)
    keys = [make_key(i, namespace=namespace) for i, namespace in enumerate(turns)]
    sizes = None if lengths is None else [lengths[i // 2 % len(lengths)] for i in range(num_keys)]
    expected = list(zip(keys, [None] * num_keys if sizes is None else sizes, strict=True))
    assert received(keys, sizes) == expected
    assert num_keys == 0 or len(group(keys, sizes).fields) <= num_namespaces * len(lengths or [0])


@pytest.mark.parametrize("num_keys", [1, NUMPY_PAYS_FROM])
def test_hashes_that_are_cut_off(num_keys: int) -> None:
    keys: list[StoreKey] = []
    with pytest.raises(InvalidInputError, match="multiple of 32"):
        add_keys(keys, RED, bytes(16), bytes(32 * num_keys - 1), PoolLimits())
    with pytest.raises(LimitExceededError, match="max_batch_blocks"):
        add_keys(keys, RED, bytes(16), bytes(32 * (PoolLimits().max_batch_blocks + 1)), PoolLimits())
    assert keys == []


@pytest.mark.parametrize("num_keys", COUNTS)
def test_block_keys_in_one_namespace_are_sent_as_their_store_keys(num_keys: int) -> None:
    namespace = NamespaceId(b"\7" * 16)
    keys = [block_key(RED, ChainHash(bytes([i % 251, i // 251]) * 16)) for i in range(num_keys)]
    ours, usual = group_of_rank(keys, namespace), group(rank_keys(keys, namespace))
    assert (ours.fields, ours.order) == (usual.fields, usual.order) if keys else not ours.order
