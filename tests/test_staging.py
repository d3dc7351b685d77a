"""How staging memory of a device is divided among the copies at a time."""

import pytest

from kvtier.errors import ConfigError
from kvtier.staging import Staging, staging_of

MIB = 1 << 20


@pytest.mark.parametrize(
    ("total_bytes", "block_bytes", "expected"),
    [
        (128 * MIB, 2 * MIB, Staging(6, 128 * MIB // 6)),
        (12 * MIB, 2 * MIB, Staging(6, 2 * MIB)),
        (12 * MIB - 1, 2 * MIB, Staging(5, (12 * MIB - 1) // 5)),
        (50 * MIB, 50 * MIB, Staging(1, 50 * MIB)),
    ],
    ids=["as configured", "just a block each", "fewer copies", "one block"],
)
def test_the_bound_holds_for_all_lanes_together(total_bytes: int, block_bytes: int, expected: Staging) -> None:
    staging = staging_of(total_bytes, block_bytes=block_bytes, num_copies=6)
    assert staging == expected
    assert staging.num_lanes * (staging.lane_bytes // block_bytes) * block_bytes <= total_bytes
    assert staging.lane_bytes >= block_bytes


def test_too_little_for_a_block_is_told_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"cache\.staging_bytes: 1,000 bytes .* no block of 1,001; give"):
        staging_of(1000, block_bytes=1001, num_copies=6)
