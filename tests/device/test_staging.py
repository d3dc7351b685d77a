"""How staging memory of a device is divided among the copies at a time."""

import pytest

from kvtier.device.staging import lanes_within
from kvtier.errors import ConfigError

MIB = 1 << 20


@pytest.mark.parametrize(
    ("staging_bytes", "block_bytes", "expected"),
    [(128 * MIB, 2 * MIB, 6), (12 * MIB, 2 * MIB, 6), (12 * MIB - 1, 2 * MIB, 5), (50 * MIB, 50 * MIB, 1)],
    ids=["as configured", "just a block each", "fewer copies", "one block"],
)
def test_the_bound_holds_for_all_copies_together(staging_bytes: int, block_bytes: int, expected: int) -> None:
    assert lanes_within(staging_bytes, block_bytes=block_bytes, num_copies=6) == expected


def test_too_little_for_a_block_is_told_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"cache\.staging_bytes: 1,000 bytes hold no block of 1,001; .* and 6,006"):
        lanes_within(1000, block_bytes=1001, num_copies=6)
