"""How the device memory that copies are staged in is divided among them."""

from dataclasses import dataclass

from kvtier.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Staging:
    """Buffers of one size on the device, one for each copy at a time."""

    num_lanes: int
    lane_bytes: int


def staging_of(total_bytes: int, *, block_bytes: int, num_copies: int) -> Staging:
    """A lane for each copy, or fewer where so many would hold no block each.

    Raises `ConfigError`: not even one would.

    :param total_bytes: of all lanes.
    """
    num_lanes = min(num_copies, total_bytes // block_bytes)
    if num_lanes < 1:
        raise ConfigError(
            f"cache.staging_bytes: {total_bytes:,} bytes for staging copies of these layers hold no block of "
            f"{block_bytes:,}; give each KV group that much, and {num_copies} times as much for copies side by side"
        )
    return Staging(num_lanes, total_bytes // num_lanes)
