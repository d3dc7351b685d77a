"""How the device memory that copies are staged in is divided among them."""

from kvtier.errors import ConfigError


def lanes_within(staging_bytes: int, *, block_bytes: int, num_copies: int) -> int:
    """How many copies run at a time: `num_copies`, or fewer where so many would have room for no block each.

    Raises `ConfigError`: there is no room for one block.

    :param staging_bytes: of all copies at a time together.
    """
    num_lanes = min(num_copies, staging_bytes // block_bytes)
    if num_lanes < 1:
        raise ConfigError(
            f"cache.staging_bytes: {staging_bytes:,} bytes hold no block of {block_bytes:,}; give at least that much, "
            f"and {num_copies * block_bytes:,} for {num_copies} copies at a time"
        )
    return num_lanes
