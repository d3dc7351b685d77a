"""Attention of one new token per sequence where sequences share leading blocks, as Triton kernels.

ChunkAttention's two phases (Ye et al., 2024): the queries of a group of sequences meet the keys that all of them share
in one product, so that these keys are read once, not once per sequence; then each sequence's queries meet the keys that
are its own. Both are cut into runs, and the states of all runs are merged.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import math
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels.attention.attention_batch import AttentionBatch
from kvtier_kernels.attention.merge_states import empty_states, launch_merge
from kvtier_kernels.attention.paged_decode import launch_decode
from kvtier_kernels.attention.paged_softmax import attend_keys, store_states
from kvtier_kernels.attention.prefix_prefill import sequence_of_tile
from kvtier_kernels.attention.shared_prefixes import SharedPrefixes
from kvtier_kernels.launching import (
    FUSE,
    capability,
    check_attention_limits,
    check_block_ids,
    check_launchable,
    check_tile,
    num_multiprocessors,
    on_device_of,
    per_key_stride,
    stored_values,
)
from kvtier_kernels.tiles import Tile, decode_runs, decode_tile, padded_head_dim, shared_prefix_tile


def shared_prefix_decode(
    query: Tensor,
    kv_layer: Tensor,
    batch: AttentionBatch,
    kv_scales: Tensor | None = None,
    lse: Tensor | None = None,
    *,
    num_splits: tuple[int, int] | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Attention as `kvtier_kernels.attention.paged_decode.paged_decode`, with the batch's `prefixes`.

    Waits for nothing. Sums are in an order that follows from the lengths and groups alone.

    :param batch: it and its `check` describe the arguments. `prefixes` are of its `block_tables`, and of its `seq_lens`
        or shorter ones: a sequence that is shorter than what its group shares gets a wrong result. `query_starts` and
        hints are not used.
    :param num_splits: into how many runs shared keys are cut, and into how many a sequence's own;
        `tiles.decode_runs` chooses when None.
    :param tile: for shared keys; what `tiles.shared_prefix_tile` chooses when None.
    :raises ValueError: on a wrong shape, dtype, stride or device, heads that do not fit the chip's shared memory, and
        on a batch without prefixes, with a window or with slopes, all of which `paged_decode` takes.
    """
    plan = plan_shared_decode(query, kv_layer, batch, kv_scales, lse, num_splits=num_splits, tile=tile)
    return plan.run(query, kv_layer, kv_scales, lse)


@dataclass(frozen=True, slots=True, eq=False)
class SharedDecodePlan:
    """How `shared_prefix_decode` computes a batch: checked and chosen once, for all layers of a model."""

    batch: AttentionBatch
    prefixes: SharedPrefixes
    """The batch's."""
    num_splits: tuple[int, int]
    """The numbers of runs into which shared keys are cut, and a sequence's own."""
    run_keys: tuple[int, int]
    tile: Tile
    own_tile: Tile

    def run(
        self, query: Tensor, kv_layer: Tensor, kv_scales: Tensor | None = None, lse: Tensor | None = None
    ) -> Tensor:
        """`shared_prefix_decode` of one layer. Checks nothing: the caller knows that the tensors have the shapes,
        strides, dtypes and devices of those that the plan was made for."""
        out = query.new_empty(query.shape)
        if query.size(0) == 0:
            return out
        batch, prefixes = self.batch, self.prefixes
        num_shared, num_own = self.num_splits
        shared_run, own_run = self.run_keys
        parts, part_lse = empty_states(query, num_shared + num_own)
        _launch_shared(
            query, kv_layer, kv_scales, batch, prefixes, parts, part_lse,
            num_splits=num_shared, run_keys=shared_run, tile=self.tile,
        )  # fmt: skip
        launch_decode(
            query, kv_layer, kv_scales, batch, prefixes.own_starts, parts, part_lse,
            scoring=batch.scoring.without_sinks(), num_splits=num_own, run_keys=own_run,
            first_state=num_shared, tile=self.own_tile,
        )  # fmt: skip
        launch_merge(parts, part_lse, out, lse, batch.scoring.sinks)
        return out


def plan_shared_decode(
    query: Tensor,
    kv_layer: Tensor,
    batch: AttentionBatch,
    kv_scales: Tensor | None = None,
    lse: Tensor | None = None,
    *,
    num_splits: tuple[int, int] | None = None,
    tile: Tile | None = None,
) -> SharedDecodePlan:
    """Checks the arguments of `shared_prefix_decode`, which describes them, and chooses how they are computed.

    :raises ValueError: as `shared_prefix_decode` does.
    """
    check_launchable("kv_layer", kv_layer, _shared_kernel)
    batch.check(query, kv_layer, kv_scales, lse)
    prefixes = batch.prefixes
    if prefixes is None:
        raise ValueError("prefixes is None: needs those of the batch; use paged_decode")
    if batch.window is not None:
        raise ValueError("window given: not all sequences of a group see what they share; use paged_decode")
    if batch.scoring.alibi_slopes is not None:
        raise ValueError("alibi_slopes given: sequences of a group stand at different tokens; use paged_decode")
    check_attention_limits(query, kv_layer)
    num_seqs, num_heads, head_dim = query.shape
    if batch.seq_lens.size(0) != num_seqs or prefixes.num_seqs != num_seqs:
        raise ValueError(
            f"{num_seqs} queries, {batch.seq_lens.size(0)} sequences, prefixes of {prefixes.num_seqs}: needs one each"
        )
    if prefixes.index.device != query.device:
        raise ValueError(f"prefixes are on {prefixes.index.device}, query on {query.device}")
    check_block_ids(kv_layer, batch.block_tables, batch.seq_lens, None, None)
    num_kv_heads, chip = kv_layer.size(3), capability(query.device)
    group = num_heads // num_kv_heads
    own_tile = decode_tile(head_dim, query.element_size(), group, chip, kv_bytes=kv_layer.element_size())
    if tile is None:
        tile = shared_prefix_tile(head_dim, query.element_size(), group, chip, kv_bytes=kv_layer.element_size())
    for one in (tile, own_tile):
        check_tile(one, query, kv_layer, chip)
    if num_splits is None:
        chip_size = num_multiprocessors(query.device)
        num_shared, shared_run = _shared_runs(prefixes, tile.rows // group, num_kv_heads, chip_size)
        mean_own_keys = prefixes.num_own_keys // max(1, num_seqs)
        num_own, own_run = decode_runs(num_seqs * num_kv_heads, mean_own_keys, prefixes.max_own_keys, chip_size)
    elif all(1 <= number <= 1024 for number in num_splits):
        (num_shared, num_own), shared_run, own_run = num_splits, 1, 1
    else:
        raise ValueError(f"num_splits is {num_splits}: needs 1 to 1024")
    return SharedDecodePlan(batch, prefixes, (num_shared, num_own), (shared_run, own_run), tile, own_tile)


def _shared_runs(
    prefixes: SharedPrefixes, tile_seqs: int, num_kv_heads: int, num_multiprocessors: int
) -> tuple[int, int]:
    """`tiles.decode_runs` of tiles of sequences, as long as what their groups share."""
    num_tiles = [-(-size // tile_seqs) for size in prefixes.group_sizes]
    num_keys = sum(tiles * keys for tiles, keys in zip(num_tiles, prefixes.shared_keys, strict=True))
    mean_keys = num_keys // max(1, sum(num_tiles))
    max_keys = max(prefixes.shared_keys, default=0)
    return decode_runs(sum(num_tiles) * num_kv_heads, mean_keys, max_keys, num_multiprocessors)


def _launch_shared(
    query: Tensor,
    kv_layer: Tensor,
    kv_scales: Tensor | None,
    batch: AttentionBatch,
    prefixes: SharedPrefixes,
    parts: Tensor,
    part_lse: Tensor,
    *,
    num_splits: int,
    run_keys: int,
    tile: Tile,
) -> None:
    """States 0 to `num_splits` of every sequence; those of sequences that share nothing are empty."""
    num_seqs, num_heads, head_dim = query.shape
    _, _, tokens_per_block, num_kv_heads, _ = kv_layer.shape
    group = num_heads // num_kv_heads
    tile_seqs = tile.rows // group
    scales_stride = per_key_stride(kv_scales)
    with on_device_of(query):
        _shared_kernel[((num_seqs // tile_seqs + prefixes.num_groups) * num_kv_heads, num_splits)](
            query, stored_values(kv_layer, capability(query.device)), kv_scales, batch.block_tables,
            prefixes.members, prefixes.group_starts, prefixes.group_keys, parts, part_lse,
            batch.scale * math.log2(math.e), query.stride(0), kv_layer.stride(0), scales_stride or 0,
            batch.block_tables.size(1), prefixes.num_groups, run_keys, parts.size(2),
            HEAD_DIM=head_dim, GROUP=group, NUM_KV_HEADS=num_kv_heads, TOKENS_PER_BLOCK=tokens_per_block,
            SOFT_CAP=batch.scoring.soft_cap, TILE_SEQS=tile_seqs, ROWS=tile.rows, KEYS=tile.keys,
            COLUMNS=padded_head_dim(head_dim), PER_KEY_SCALES=scales_stride is not None,
            num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=FUSE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["table_width", "num_groups", "run_keys", "num_states"])
def _shared_kernel(
    query, kv, kv_scales, block_tables, members, group_starts, group_keys, parts, part_lse,
    score_scale, query_stride, block_stride, scales_stride, table_width, num_groups, run_keys, num_states,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr,
    SOFT_CAP: tl.constexpr, TILE_SEQS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    PER_KEY_SCALES: tl.constexpr,
):  # fmt: skip
    """A run of keys for a tile of a group's sequences, numbered as `prefix_prefill` numbers its tiles of queries."""
    tile = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    split = tl.program_id(1)
    group = sequence_of_tile(group_starts, tile, num_groups, TILE_SEQS)
    start = tl.load(group_starts + group)
    size = tl.load(group_starts + group + 1) - start
    first_member = (tile - (start // TILE_SEQS + group)) * TILE_SEQS
    if first_member >= size:
        return
    row = tl.arange(0, ROWS)
    member = first_member + row // GROUP
    live = (row < TILE_SEQS * GROUP) & (member < size)
    seq = tl.load(members + start + member, mask=live, other=0).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    out_rows = (seq * (NUM_KV_HEADS * GROUP) + head) * num_states + split
    num_keys = tl.load(group_keys + group)
    # Runs of whole tiles, so that only the last one ends inside a tile. Runs beyond it are empty.
    num_runs = tl.minimum(tl.cdiv(tl.maximum(num_keys, 1), run_keys), tl.num_programs(1))
    run = tl.cdiv(tl.cdiv(num_keys, num_runs), KEYS) * KEYS
    begin = split * run
    if begin >= num_keys:
        tl.store(part_lse + out_rows, float("-inf"), mask=live)
        return
    stop = tl.minimum(begin + run, num_keys)
    whole = begin + (stop - begin) // KEYS * KEYS

    column = tl.arange(0, COLUMNS)
    live_elements = live[:, None] & (column < HEAD_DIM)[None, :]
    query_offsets = (seq * query_stride + head * HEAD_DIM)[:, None] + column[None, :]
    q = tl.load(query + query_offsets, mask=live_elements, other=0.0)

    # Any member's will do.
    block_table = block_tables + tl.load(members + start).to(tl.int64) * table_width
    position = tl.zeros([ROWS], dtype=tl.int32) + num_keys
    attended, row_lse = attend_keys(
        q, kv, kv_scales, kv_head, block_table,
        begin, begin, whole, begin, stop, position, head, live,
        None, None, score_scale, block_stride, scales_stride,
        HEAD_DIM, NUM_KV_HEADS, TOKENS_PER_BLOCK, None, SOFT_CAP, KEYS, COLUMNS, PER_KEY_SCALES,
    )  # fmt: skip
    store_states(parts, part_lse, out_rows, attended, row_lse, live, live, HEAD_DIM, COLUMNS)
