"""One tier to the engine, one per tenant below."""

import pytest

from kvtier.errors import InvalidInputError
from kvtier.identity.keys import tenant_id
from kvtier.testing.contract import (
    MakeTier,
    TierContract,
    make_key,
    make_payload,
    read_blocks,
    summed,
    tier_state_machine,
)
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.common.per_tenant import PerTenant
from kvtier.tiers.host.tier import HostTier

RED, BLUE = tenant_id("red"), tenant_id("blue")


def two_tiers(capacity_bytes: int) -> PerTenant:
    return PerTenant("two", {tenant: HostTier(capacity_bytes, slab_bytes=2**18) for tenant in (RED, BLUE)})


class TestPerTenant(TierContract):
    verifies = False

    @pytest.fixture
    def make_tier(self) -> MakeTier:
        return two_tiers


TestPerTenantStates = tier_state_machine(two_tiers).TestCase


def test_a_batch_of_several_tenants_is_answered_in_order() -> None:
    tiers = {tenant: HostTier(2**20, slab_bytes=2**18) for tenant in (RED, BLUE)}
    both = PerTenant("both", tiers)
    red, blue = ([make_key(label, tenant=tenant) for label in range(4)] for tenant in (RED, BLUE))
    mixed = [key for pair in zip(red, blue, strict=True) for key in pair]
    payloads = {key: make_payload(key, 64) for key in mixed}
    assert both.write([summed(key, payloads[key]) for key in mixed]) == [WriteStatus.STORED] * 8
    tiers[BLUE].discard(blue[:2])
    hit, miss = Status.HIT, Status.MISS
    assert both.lookup(mixed) == [hit, miss, hit, miss, hit, hit, hit, hit]
    assert read_blocks(both, mixed, 64) == [payloads[key] if key not in blue[:2] else None for key in mixed]
    assert tiers[RED].lookup(blue) == tiers[BLUE].lookup(red) == [miss] * 4
    assert both.usage().num_blocks == 6
    assert both.discard(mixed) == 6
    both.close()


def test_a_stranger_is_refused_before_anything_is_done() -> None:
    both = two_tiers(2**20)
    keys = [make_key(1, tenant=RED), make_key(1, tenant=tenant_id("green"))]
    with pytest.raises(InvalidInputError, match="1 tenants that it is not connected for"):
        both.write([summed(key, bytes(64)) for key in keys])
    assert both.lookup(keys[:1]) == [Status.MISS]
    both.close()
