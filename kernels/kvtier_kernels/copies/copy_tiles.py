"""How much of a copy one Triton program takes: as `tiles`, for the kernels that move and quantise KV."""

from dataclasses import dataclass

from kvtier_kernels.tiles import next_power_of_two, padded_head_dim

_COPY_BYTES, _COPY_WARPS = 16384, 4
_HOST_COPY_BYTES, _HOST_COPY_WARPS = 65536, 16
_MULTIPROCESSORS_PER_HOST_COPY_PROGRAM = 32


@dataclass(frozen=True, slots=True)
class CopyTile:
    """What a program of a copy holds at a time: so much of so many blocks. Powers of two."""

    rows: int
    """Blocks."""
    words: int
    """Words of each."""
    word_bytes: int
    num_warps: int


def copy_tile(unit_bytes: int, part_bytes: int, *, host: bool) -> CopyTile:
    """Chooses the tile of `block_copy` and `part_copy`. Small parts go several blocks at a time, so that as much is in
    flight.

    :param unit_bytes: 1, 2, 4, 8 or 16: what divides all addresses and lengths.
    :param host: one side is host memory, and there are few programs: each has more in flight.
    """
    tile_bytes, num_warps = (_HOST_COPY_BYTES, _HOST_COPY_WARPS) if host else (_COPY_BYTES, _COPY_WARPS)
    word_bytes = min(unit_bytes, 4)
    tile_words = tile_bytes // 4
    words = min(tile_words, next_power_of_two(-(-part_bytes // word_bytes)))
    return CopyTile(tile_words // words, words, word_bytes, num_warps)


def host_copy_programs(num_multiprocessors: int) -> int:
    """How many programs are to saturate the bus to the host: 1 in 32 multiprocessors. Reckoned, not measured.

    A PCIe 5.0 x16 link holds about 80 KiB in flight (55 GB/s times 1.5 us); 4 programs of an H200 ask for 256 KiB, and
    leave 97 % of its multiprocessors to the kernels that compute beside them.
    """
    return max(2, num_multiprocessors // _MULTIPROCESSORS_PER_HOST_COPY_PROGRAM)


@dataclass(frozen=True, slots=True)
class QuantiseTile:
    """What a program of `quantised_copy` holds at a time. Powers of two."""

    vectors: int
    columns: int
    num_warps: int


def quantise_tile(head_dim: int, *, host: bool) -> QuantiseTile:
    """Chooses the tile of `quantised_copy`: 32 elements a thread.

    :param host: one side is host memory, and there are few programs: each has more in flight.
    """
    num_warps = 16 if host else 4
    columns = padded_head_dim(head_dim)
    return QuantiseTile(max(1, num_warps * 1024 // columns), columns, num_warps)


SUM_GROUPS = 4
"""The KiB of a block that a program of `block_checksum`'s first kernel takes, in one warp: no sum leaves the warp, and
each thread has 16 words in flight."""


@dataclass(frozen=True, slots=True)
class ChainTile:
    """What a program of `block_checksum`'s second kernel takes, in one warp. Powers of two."""

    blocks: int
    """How many blocks it takes, with 8 threads each."""
    ahead: int
    """Groups of a block whose sums are loaded together."""


CHAIN_TILE = ChainTile(4, 32)
