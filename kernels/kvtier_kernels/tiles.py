"""How much of the work one Triton program takes: pure functions of shapes and chip.

Nothing is tuned at run time: a first request must not wait for a search. What the functions return is compiled ahead
of time by the tests, which hold that it fits into the chip's shared memory.
"""

import functools
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

MAX_HEAD_DIM = 256
MAX_GROUP = 256
MAX_BLOCK_ELEMENTS = 2**31 - 1
"""Places inside of a block are counted in 32 bits, blocks and what lies between them in 64."""
MIN_DOT = 16
"""`tl.dot` takes no side below this."""
MAX_SPLITS = 256
_KEYS_PER_SPLIT = 256
_PROGRAMS_PER_MULTIPROCESSOR = 2
_MAX_PREFILL_SPLITS = 64
_KEYS_PER_PART = 256
"""What writing and reading the result of a run costs, a row of float32: some 256 keys' products on an H100."""
_KEYS_PER_MERGE = 1024
"""What launching one more kernel costs, in keys whose products take as long on an H100."""
_SHARING_BYTES = 32 * 2**20
_LAUNCHING_BYTES = 2**30
_MERGE_ELEMENTS = 4096


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program of an attention kernel holds at a time. All powers of two."""

    rows: int
    """Rows of queries: tokens times the query heads of one KV head."""
    keys: int
    """Keys per iteration."""
    num_warps: int
    num_stages: int
    """How many iterations' keys and values are in flight."""

    def shared_bytes(self, columns: int, element_bytes: int) -> int:
        """Returns no less than what the compiler takes of the chip's shared memory, on any chip.

        The queries stay there, and keys and values of the iterations in flight. Matrix units that a thread waits for
        (`mma.sync`) leave the memory of an iteration free one iteration earlier than those that run on their own
        (wgmma, tcgen05, from 64 rows on), but the weights pass through it between the two products. Without any
        iteration in flight, keys and values take turns.
        """
        tile_bytes = self.keys * columns * element_bytes
        in_flight = 1 if self.num_stages == 1 else 2 * max(2, self.num_stages - 1)
        needed = self.rows * (self.keys * element_bytes + 4) + in_flight * tile_bytes
        if self.rows >= 64 and self.num_stages > 1:
            needed = max(needed, max(self.rows, self.keys) * 8 + 2 * self.num_stages * tile_bytes)
        return self.rows * columns * element_bytes + needed


def next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def padded_head_dim(head_dim: int) -> int:
    """The columns of a tile. Columns beyond `head_dim` are masked."""
    return max(MIN_DOT, next_power_of_two(head_dim))


def shared_limit_bytes(capability: tuple[int, int]) -> int:
    """What one program may take, by the CUDA C++ programming guide; on chips that it does not name, the least."""
    if capability == (9, 0) or capability[0] in (10, 11):
        return 227 * 1024
    return (163 if capability in ((8, 0), (8, 7)) else 99) * 1024


class Chips(Enum):
    """Chips whose matrix units and shared memory are alike."""

    HOPPER = "9.0: wgmma, 227 KiB"
    BLACKWELL = "10.x and 11.x: tcgen05, whose sums are not in registers, 227 KiB"
    AMPERE = "8.0 and 8.7: mma.sync, 163 KiB"
    SMALL = "all others: mma.sync, 99 KiB"

    @classmethod
    def of(cls, capability: tuple[int, int]) -> "Chips":
        if capability == (9, 0):
            return cls.HOPPER
        if capability[0] in (10, 11):
            return cls.BLACKWELL
        return cls.AMPERE if capability in ((8, 0), (8, 7)) else cls.SMALL


class _Prefill(NamedTuple):
    """Rows, keys and warps of `prefix_prefill`; three stages always."""

    plain: tuple[int, int, int]
    more: tuple[int, int, int]
    """The tile with a window or changed scores, which take registers."""
    converting: tuple[int, int, int]
    """The tile with keys of fewer bytes than the queries have, whatever else there is."""


_PREFILL_TILES = {
    # chips, columns up to:             plain          more           converting
    (Chips.HOPPER, 64): _Prefill((128, 64, 8), (128, 64, 8), (128, 64, 8)),
    (Chips.HOPPER, 128): _Prefill((128, 128, 8), (128, 64, 8), (128, 64, 8)),
    (Chips.HOPPER, 256): _Prefill((128, 32, 8), (128, 32, 8), (64, 16, 4)),
    (Chips.BLACKWELL, 64): _Prefill((128, 128, 8), (128, 64, 8), (128, 32, 8)),
    (Chips.BLACKWELL, 128): _Prefill((128, 64, 8), (128, 64, 8), (128, 32, 8)),
    (Chips.BLACKWELL, 256): _Prefill((128, 32, 8), (64, 32, 8), (64, 16, 8)),
    (Chips.AMPERE, 64): _Prefill((128, 64, 8), (128, 64, 8), (128, 32, 8)),
    (Chips.AMPERE, 128): _Prefill((128, 64, 8), (128, 64, 8), (128, 32, 8)),
    (Chips.AMPERE, 256): _Prefill((64, 32, 8), (64, 32, 8), (64, 32, 8)),
    (Chips.SMALL, 64): _Prefill((128, 64, 8), (128, 64, 8), (128, 32, 8)),
    (Chips.SMALL, 128): _Prefill((128, 32, 8), (128, 32, 8), (128, 32, 8)),
    (Chips.SMALL, 256): _Prefill((64, 16, 8), (64, 16, 8), (64, 16, 8)),
}
"""Keys are as many as leave registers unspilled under every supported Triton: `docs/kernel-resources.md`."""


def prefill_tile(
    head_dim: int,
    element_bytes: int,
    group: int,
    capability: tuple[int, int],
    *,
    kv_bytes: int | None = None,
    windowed: bool = False,
    scored: bool = False,
) -> Tile:
    """Chooses the tile of `prefix_prefill`.

    128 rows, where they fit, read each key once for as many products as its way from the L2 cache takes time. Three
    stages are the least that has keys on their way during a whole iteration.

    :param element_bytes: of the queries.
    :param group: query heads per KV head; a tile has a row for each of them.
    :param capability: of the chip, e.g. (9, 0).
    :param kv_bytes: of a stored key's element, `element_bytes` when None.
    :param windowed: there is a sliding window.
    :param scored: scores are capped, or fall with distance.
    """
    least_rows = max(MIN_DOT, next_power_of_two(group))
    columns = padded_head_dim(head_dim)
    if element_bytes == 4 and columns > 128:
        return _float32_tile(least_rows, columns)
    if element_bytes == 4:
        return _fitted(Tile(max(32, least_rows), 32, num_warps=8, num_stages=1), columns, element_bytes, capability)
    tiles = _PREFILL_TILES[Chips.of(capability), max(64, columns)]
    if kv_bytes is not None and kv_bytes != element_bytes:
        rows, keys, num_warps = tiles.converting
    else:
        rows, keys, num_warps = tiles.more if windowed or scored else tiles.plain
    return _fitted(Tile(max(rows, least_rows), keys, num_warps, num_stages=3), columns, element_bytes, capability)


@functools.lru_cache(maxsize=256)
def prefill_splits(num_programs: int, max_keys: int, num_multiprocessors: int) -> int:
    """Into how many runs `prefix_prefill` cuts the keys that each tile of queries sees.

    The time is that of the busiest multiprocessor, in keys it goes through, when programs are dealt out in turn; runs
    add what it costs to write and read their results once more. Few runs take less memory: the fewest that come within
    a tenth of the least time.

    :param num_programs: tiles of queries times KV heads: what there is to do without any split.
    """

    def time(splits: int) -> int:
        turns = -(-num_programs * splits // num_multiprocessors)
        if splits == 1:
            return turns * max_keys
        return turns * (-(-max_keys // splits) + _KEYS_PER_PART) + _KEYS_PER_MERGE

    times = [time(splits) for splits in range(1, _MAX_PREFILL_SPLITS + 1)]
    return next(splits for splits, needed in enumerate(times, 1) if needed <= 1.1 * min(times))


def decode_tile(
    head_dim: int, element_bytes: int, group: int, capability: tuple[int, int], *, kv_bytes: int | None = None
) -> Tile:
    """The tile of `paged_decode`: few rows, so that the time goes into reading keys, several iterations ahead.

    Arguments as for `prefill_tile`.
    """
    rows = max(MIN_DOT, next_power_of_two(group))
    columns = padded_head_dim(head_dim)
    if element_bytes == 4:
        return _float32_tile(rows, columns)
    wide, converts = columns > 128, kv_bytes is not None and kv_bytes != element_bytes
    blackwell = Chips.of(capability) is Chips.BLACKWELL
    keys = 16 if wide and converts and blackwell else 32 if wide else 64
    num_warps = 4 if rows <= 32 and (converts or not wide or not blackwell) else 8
    return _fitted(Tile(rows, keys, num_warps, num_stages=3), columns, element_bytes, capability)


def shared_prefix_tile(
    head_dim: int, element_bytes: int, group: int, capability: tuple[int, int], *, kv_bytes: int | None = None
) -> Tile:
    """Chooses the tile for what `shared_prefix_decode` computes for several sequences at once.

    As many rows as products on tensor cores keep up with reading keys, whether a group fills them or not: a size for
    each size of group would be a kernel more to compile for each. Keys per iteration as for `prefill_tile`, which
    describes the arguments.
    """
    rows = max(64, next_power_of_two(group))
    columns = padded_head_dim(head_dim)
    if element_bytes == 4:
        return _float32_tile(next_power_of_two(group), columns)
    converts = kv_bytes is not None and kv_bytes != element_bytes
    chips = Chips.of(capability)
    asynchronous = chips in (Chips.HOPPER, Chips.BLACKWELL)
    if columns <= 128:
        keys = 64 if (asynchronous or columns <= 64) and not converts else 32
    else:
        keys = 16 if converts else 32
    num_warps = 4 if columns <= 128 and rows <= 64 else 8
    if columns <= 64 and chips is Chips.BLACKWELL and not converts:
        num_warps = 8
    return _fitted(Tile(rows, keys, num_warps, num_stages=3), columns, element_bytes, capability)


def _fitted(tile: Tile, columns: int, element_bytes: int, capability: tuple[int, int]) -> Tile:
    """Wide groups of wide heads leave less room for keys. Rows cannot be fewer: the launcher refuses what is left."""
    limit = shared_limit_bytes(capability)
    while tile.shared_bytes(columns, element_bytes) > limit and tile.num_stages > 1:
        tile = replace(tile, num_stages=tile.num_stages - 1)
    while tile.shared_bytes(columns, element_bytes) > limit and tile.keys > MIN_DOT:
        tile = replace(tile, keys=tile.keys // 2)
    return tile


def _float32_tile(least_rows: int, columns: int) -> Tile:
    """Float32 products run outside the tensor cores, with their operands in registers: those must fit."""
    return Tile(rows=max(32 if columns <= 128 else 16, least_rows), keys=16, num_warps=4, num_stages=1)


@functools.lru_cache(maxsize=256)
def decode_splits(num_programs: int, max_keys: int, num_multiprocessors: int) -> int:
    """Into how many runs of keys `paged_decode` cuts each sequence.

    As many as give each multiprocessor two programs; more where some would have one program more than others, which
    wait for them, and a tenth of the time can be won. But none shorter than is worth merging.

    :param num_programs: sequences times KV heads: what there is to do without any split.
    """
    most = max(1, min(-(-max_keys // _KEYS_PER_SPLIT), MAX_SPLITS))
    fewest = min(most, max(1, _PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors // max(1, num_programs)))

    def time(splits: int) -> float:
        """Returns the time of the multiprocessor with most programs, in sequences."""
        return -(-num_programs * splits // num_multiprocessors) / splits

    shortest = min(time(splits) for splits in range(fewest, most + 1))
    return next(splits for splits in range(fewest, most + 1) if time(splits) <= 1.1 * shortest)


def decode_runs(num_programs: int, mean_keys: int, max_keys: int, num_multiprocessors: int) -> tuple[int, int]:
    """How `paged_decode` cuts sequences into runs: the most runs of a sequence, and the most keys of a run.

    Sequences of about the same length into as many runs each, as `decode_splits` says. Where some are much longer than
    others, all into runs of about the same length, a quarter of what each multiprocessor has to do in all: otherwise
    everybody would wait for the longest.

    :param num_programs: sequences times KV heads.
    """
    if 2 * max_keys <= 3 * mean_keys:
        splits = decode_splits(num_programs, max_keys, num_multiprocessors)
        return splits, max(1, -(-max_keys // splits))
    share = num_programs * mean_keys // num_multiprocessors
    run_keys = max(share // 4, _KEYS_PER_SPLIT, -(-max_keys // MAX_SPLITS))
    return -(-max_keys // run_keys), run_keys


def decode_runs_of_any_length(
    num_seqs: int, num_kv_heads: int, max_keys: int, num_multiprocessors: int
) -> tuple[int, int]:
    """Does as `decode_runs` for sequences of any lengths up to `max_keys`: a CUDA graph keeps its runs for all steps.

    As many runs as let one long sequence, beside others that are short, fill the chip. A run has no fewer keys than is
    worth merging, and more where the sequences fill the chip without being cut. Short sequences have fewer runs: the
    programs of the others end at once.
    """
    run_keys = _KEYS_PER_SPLIT * max(1, num_seqs * num_kv_heads // num_multiprocessors)
    return min(decode_splits(num_kv_heads, max_keys, num_multiprocessors), -(-max_keys // run_keys)), run_keys


def worth_sharing(num_saved_keys: int, key_bytes: int, num_rows: int, head_dim: int, *, replayed: bool = False) -> bool:
    """Whether `shared_prefix_decode` takes less time than `paged_decode`.

    What it saves is reading keys. When sequences of a group run side by side, the chip's cache has answered a part of
    these reads before, at about twice the memory's speed: a byte saved counts half. What it costs is a launch more,
    about 4 microseconds, in which a chip of 4 TB/s reads 16 MiB; and two states of each row, which are written and
    read, in the cache as well.

    :param key_bytes: of a token's keys and values in one layer.
    :param num_rows: sequences times query heads.
    :param replayed: `paged_decode` would be replayed from a CUDA graph. Then sharing costs as much more as it takes the
        host to launch the operations of a layer, some 20, one by one: about 125 microseconds, in which such a chip
        reads 512 MiB.
    """
    state_bytes = 4 * (head_dim + 1)
    least_bytes = _LAUNCHING_BYTES if replayed else _SHARING_BYTES
    return num_saved_keys * key_bytes > least_bytes + 4 * num_rows * state_bytes


def merge_rows(columns: int) -> int:
    """Returns how many states of a row a program of `merge_states` takes at a time.

    As much as the registers of 4 warps have room for: all of it is on its way at a time.
    """
    return max(1, _MERGE_ELEMENTS // columns)
