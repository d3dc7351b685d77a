"""Keys of tenants for tests of sealed blocks."""

from kvtier.codec.sealed_form import StorageSeal, StorageSeals
from kvtier.codec.sealing import Purpose, SealingKeys
from kvtier.identity.keys import StoreKey, TenantId, tenant_id
from kvtier.metrics import Metrics
from kvtier.testing.blocks import make_key

RED, BLUE = tenant_id("red"), tenant_id("blue")
KEYS = {number: bytes([number]) * 32 for number in range(1, 5)}
"""By their ids."""


def key_of(tenant: TenantId, label: object) -> StoreKey:
    return StoreKey(tenant + make_key(label)[16:])


def storage_keys(*ids: int, tenant: TenantId = RED) -> SealingKeys:
    return SealingKeys(Purpose.STORAGE, tenant, {number: KEYS[number] for number in ids})


def carriage_keys(*ids: int, tenant: TenantId = RED) -> SealingKeys:
    """What an engine seals with before blocks go to a pool."""
    return SealingKeys(Purpose.CARRIAGE, tenant, {number: KEYS[number] for number in ids})


def seals(*ids: int, tenant: TenantId = RED, reads_plain: bool = False) -> StorageSeals:
    """One tenant with keys."""
    return StorageSeals({tenant: StorageSeal(storage_keys(*ids, tenant=tenant), reads_plain)})


def unopened(metrics: Metrics, tier: str) -> dict[str, float]:
    """How many blocks could not be opened, by why."""
    return {
        sample.labels["reason"]: sample.value
        for family in metrics.unopened_blocks.collect()
        for sample in family.samples
        if sample.name.endswith("_total") and sample.labels["tier"] == tier
    }
