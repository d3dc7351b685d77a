"""A disk tier that a test opens again and again, and the small blocks that it is given."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvtier.metrics import Metrics
from kvtier.testing.blocks import make_key, make_payload, read_blocks, summed
from kvtier.tiers.base import Item
from kvtier.tiers.disk.tier import DiskTier

KIB, MIB = 2**10, 2**20
NBYTES = 10_000
"""Bytes of a block's payload."""

Open = Callable[..., DiskTier]


@contextmanager
def reopening(folder: Path) -> Iterator[Open]:
    """Opens (again) the one disk tier of the test; checks and closes what is open at the end."""
    opened: list[DiskTier] = []

    def open_one(capacity_bytes: int = 4 * MIB, *, metrics: Metrics | None = None, **options: object) -> DiskTier:
        while opened:
            opened.pop().close()
        options.setdefault("reserve_bytes", 0)
        tier = DiskTier.open(folder, capacity_bytes, metrics=metrics, **options)  # type: ignore[arg-type]
        opened.append(tier)
        return tier

    yield open_one
    for tier in opened:
        tier.check()
        tier.close()


def block(label: object) -> Item[bytes]:
    return summed(make_key(label), make_payload(label, NBYTES))


def load(tier: DiskTier, label: object) -> bytes | None:
    return read_blocks(tier, [make_key(label)], NBYTES)[0]


def loaded(tier: DiskTier, labels: Sequence[object]) -> list[bool]:
    return [found is not None for found in read_blocks(tier, [make_key(i) for i in labels], NBYTES)]


def value(metrics: Metrics, name: str, **labels: str) -> float:
    """The value of one of the tier's counters; 0 before it has counted."""
    return metrics.registry.get_sample_value(name, {"tier": "disk", **labels}) or 0.0
