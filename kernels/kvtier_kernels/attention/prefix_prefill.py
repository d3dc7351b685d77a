"""Attention of new tokens over a cached prefix and themselves, as a Triton kernel.

A program takes a tile of one sequence's queries with all query heads of one KV head, folded into rows, so that keys
are read once for the group. Tiles are numbered over the whole batch: sequence i owns the numbers from
`query_starts[i] // tokens_per_tile + i` on. Thereby the grid follows from shapes alone, and short sequences beside
a long one cost a program each, not as many as the longest has (the numbering is that of vLLM's
`triton_unified_attention.py`).

Programs start from the last tile: within a sequence that is the one with the most keys, and what starts last should
be short. Few new tokens over many cached ones would leave most of the chip idle, so each tile's keys are cut into
runs, whose results `merge_states` puts together.

Keys of an invariant batch are not cut, and every tile of keys is masked: a row of products depends on no other row, a
tile that a row does not see adds zeros to its sums and multiplies them by one, and tiles of keys begin at the same keys
for all. So a query's bits do not depend on what is computed beside it, nor on how many of its keys are new. Decodes of
such a batch take this kernel, too.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import math
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels.attention.attention_batch import AttentionBatch
from kvtier_kernels.attention.merge_states import empty_states, launch_merge
from kvtier_kernels.attention.paged_softmax import attend_keys, store_states
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
from kvtier_kernels.scoring import Scoring
from kvtier_kernels.tiles import Tile, padded_head_dim, prefill_splits, prefill_tile


def prefix_prefill(
    query: Tensor,
    kv_layer: Tensor,
    batch: AttentionBatch,
    kv_scales: Tensor | None = None,
    lse: Tensor | None = None,
    *,
    num_splits: int | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Causal attention as `kvtier_kernels.attention.paged_attention.paged_attention`.

    Waits for nothing: values on the device are not looked at. Block ids must exist; a sequence with fewer keys than
    queries gets zeros where a query sees no key; `seq_lens` beyond what `block_tables` has room for are cut.
    Scores, softmax and sums are in float32, products in the dtype of the queries.

    :param batch: it and its `check` describe the arguments. `num_keys` and `prefixes` are not used; `max_seq_len` and
        the shapes decide into how many runs keys are cut.
    :param num_splits: that number itself; `tiles.prefill_splits` chooses when None. 1 where the batch is invariant.
    :param tile: what `tiles.prefill_tile` chooses when None.
    :raises ValueError: on a wrong shape, dtype, stride or device, or heads that do not fit the chip's shared memory.
    """
    plan = plan_prefill(query, kv_layer, batch, kv_scales, lse, num_splits=num_splits, tile=tile)
    return plan.run(query, kv_layer, kv_scales, lse)


@dataclass(frozen=True, slots=True, eq=False)
class PrefillPlan:
    """How `prefix_prefill` computes a batch: checked and chosen once, for all layers of a model."""

    batch: AttentionBatch
    num_splits: int
    tile: Tile

    def run(
        self, query: Tensor, kv_layer: Tensor, kv_scales: Tensor | None = None, lse: Tensor | None = None
    ) -> Tensor:
        """`prefix_prefill` of one layer. Checks nothing: the caller knows that the tensors have the shapes, strides,
        dtypes and devices of those that the plan was made for."""
        out = query.new_empty(query.shape)
        if query.size(0) == 0:
            return out
        scoring = self.batch.scoring
        if self.num_splits == 1:
            self._launch(query, kv_layer, kv_scales, out, lse, scoring)
            return out
        parts, part_lse = empty_states(query, self.num_splits)
        self._launch(query, kv_layer, kv_scales, parts, part_lse, scoring.without_sinks())
        launch_merge(parts, part_lse, out, lse, scoring.sinks)
        return out

    def _launch(
        self,
        query: Tensor,
        kv_layer: Tensor,
        kv_scales: Tensor | None,
        parts: Tensor,
        part_lse: Tensor | None,
        scoring: Scoring,
    ) -> None:
        num_tokens, num_heads, head_dim = query.shape
        _, _, tokens_per_block, num_kv_heads, _ = kv_layer.shape
        batch, tile = self.batch, self.tile
        num_seqs, table_width = batch.block_tables.shape
        group = num_heads // num_kv_heads
        tile_tokens = tile.rows // group
        num_tiles = num_tokens // tile_tokens + num_seqs
        scales_stride = per_key_stride(kv_scales)
        with on_device_of(query):
            _prefill_kernel[(num_tiles * num_kv_heads, self.num_splits)](
                query, stored_values(kv_layer, capability(query.device)), kv_scales,
                batch.block_tables, batch.query_starts, batch.seq_lens,
                scoring.alibi_slopes, scoring.sinks, parts, part_lse,
                batch.scale * math.log2(math.e), query.stride(0), kv_layer.stride(0), scales_stride or 0,
                table_width, table_width * tokens_per_block, num_seqs, num_tiles,
                HEAD_DIM=head_dim, GROUP=group, NUM_KV_HEADS=num_kv_heads, TOKENS_PER_BLOCK=tokens_per_block,
                WINDOW=batch.window, SOFT_CAP=scoring.soft_cap, TILE_TOKENS=tile_tokens, ROWS=tile.rows, KEYS=tile.keys,
                COLUMNS=padded_head_dim(head_dim), PER_KEY_SCALES=scales_stride is not None,
                INVARIANT=batch.invariant,
                num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=FUSE,
            )  # fmt: skip


def plan_prefill(
    query: Tensor,
    kv_layer: Tensor,
    batch: AttentionBatch,
    kv_scales: Tensor | None = None,
    lse: Tensor | None = None,
    *,
    num_splits: int | None = None,
    tile: Tile | None = None,
) -> PrefillPlan:
    """Checks the arguments of `prefix_prefill`, which describes them, and chooses how they are computed.

    :raises ValueError: as `prefix_prefill` does.
    """
    check_launchable("kv_layer", kv_layer, _prefill_kernel)
    batch.check(query, kv_layer, kv_scales, lse)
    check_attention_limits(query, kv_layer)
    num_seqs, table_width = batch.block_tables.shape
    if batch.query_starts is None:
        raise ValueError(f"query_starts is None: needs [{num_seqs + 1}]; with one query per sequence use paged_decode")
    check_block_ids(kv_layer, batch.block_tables, batch.seq_lens, batch.query_starts, batch.window)
    num_tokens, num_heads, head_dim = query.shape
    _, _, tokens_per_block, num_kv_heads, _ = kv_layer.shape
    group, chip = num_heads // num_kv_heads, capability(query.device)
    if num_tokens < num_seqs or (num_tokens and not num_seqs):
        raise ValueError(f"{num_tokens} queries for {num_seqs} sequences: needs at least one each")
    if tile is None:
        tile = prefill_tile(
            head_dim, query.element_size(), group, chip,
            kv_bytes=kv_layer.element_size(), windowed=batch.window is not None, scored=batch.scoring.changes_scores,
        )  # fmt: skip
    check_tile(tile, query, kv_layer, chip)
    tile_tokens, room = tile.rows // group, table_width * tokens_per_block
    if batch.invariant:
        if num_splits not in (None, 1):
            raise ValueError(f"num_splits is {num_splits}: keys of an invariant batch are not cut; leave it out")
        num_splits = 1
    elif num_splits is None:
        seen = batch.window and batch.window + tile_tokens
        max_keys = min(bound for bound in (room, batch.max_seq_len, seen) if bound is not None)
        # There are at least so many tiles, and no more than programs are started for.
        num_programs = max(num_seqs, -(-num_tokens // tile_tokens)) * num_kv_heads
        num_splits = prefill_splits(num_programs, max_keys, num_multiprocessors(query.device))
    elif not 1 <= num_splits <= 1024:
        raise ValueError(f"num_splits is {num_splits}: needs 1 to 1024")
    return PrefillPlan(batch, num_splits, tile)


@triton.jit
def sequence_of_tile(query_starts, tile, num_seqs, TILE_TOKENS: tl.constexpr):
    """The last sequence whose first tile is at most `tile`, by halving."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        first_tile = tl.load(query_starts + middle).to(tl.int32) // TILE_TOKENS + middle
        if first_tile <= tile:
            low = middle
        else:
            high = middle
    return low


# Batches differ in these from step to step: each kind of number would be compiled for itself, in the middle of a step.
@triton.jit(do_not_specialize=["table_width", "max_keys", "num_seqs", "num_tiles"])
def _prefill_kernel(
    query, kv, kv_scales, block_tables, query_starts, seq_lens, alibi_slopes, sinks, out, lse,
    score_scale, query_stride, block_stride, scales_stride, table_width, max_keys, num_seqs, num_tiles,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, TILE_TOKENS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    COLUMNS: tl.constexpr, PER_KEY_SCALES: tl.constexpr, INVARIANT: tl.constexpr,
):  # fmt: skip
    """out: `[num_tokens, num_heads, num_splits, HEAD_DIM]`, lse: `[num_tokens, num_heads, num_splits]` or None."""
    program = tl.program_id(0)
    split = tl.program_id(1)
    num_splits = tl.num_programs(1)
    tile = num_tiles - 1 - program // NUM_KV_HEADS
    kv_head = program % NUM_KV_HEADS
    seq = sequence_of_tile(query_starts, tile, num_seqs, TILE_TOKENS)
    start = tl.load(query_starts + seq).to(tl.int32)
    num_queries = tl.load(query_starts + seq + 1).to(tl.int32) - start
    first = (tile - (start // TILE_TOKENS + seq)) * TILE_TOKENS
    if first >= num_queries:
        return
    seq_len = tl.minimum(tl.load(seq_lens + seq), max_keys).to(tl.int32)
    before = seq_len - num_queries  # keys older than the first query
    last = tl.minimum(first + TILE_TOKENS, num_queries) - 1

    # Keys from `low` to `stop` are seen by some query of the tile, those from `all_from` to `all_to` by all of them.
    low = tl.zeros([], tl.int32)
    all_from = low
    if WINDOW is not None:
        low = tl.maximum(before + first - (WINDOW - 1), 0)
        all_from = tl.cdiv(tl.maximum(before + last - (WINDOW - 1), 0), KEYS) * KEYS
    all_to = tl.maximum(before + first + 1, 0) // KEYS * KEYS
    stop = before + last + 1
    # Runs of whole tiles of keys, so that only the last one ends inside a tile. Runs beyond it are empty.
    begin = low // KEYS * KEYS
    run = tl.cdiv(tl.cdiv(tl.maximum(stop - begin, 0), num_splits), KEYS) * KEYS
    begin += split * run
    end = begin + run
    stop = tl.minimum(stop, end)
    all_from = tl.minimum(tl.maximum(all_from, begin), end)
    all_to = tl.maximum(tl.minimum(all_to, end), all_from)
    if INVARIANT:
        all_from = begin
        all_to = begin

    row = tl.arange(0, ROWS)
    token = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    column = tl.arange(0, COLUMNS)
    live = (row < TILE_TOKENS * GROUP) & (token < num_queries)
    live_elements = live[:, None] & (column < HEAD_DIM)[None, :]
    index = (start + token).to(tl.int64)
    query_offsets = (index * query_stride + head * HEAD_DIM)[:, None] + column[None, :]
    q = tl.load(query + query_offsets, mask=live_elements, other=0.0)

    attended, row_lse = attend_keys(
        q, kv, kv_scales, kv_head, block_tables + seq.to(tl.int64) * table_width,
        begin, all_from, all_to, low, stop, before + token, head, live,
        alibi_slopes, sinks, score_scale, block_stride, scales_stride,
        HEAD_DIM, NUM_KV_HEADS, TOKENS_PER_BLOCK, WINDOW, SOFT_CAP, KEYS, COLUMNS, PER_KEY_SCALES, INVARIANT,
    )  # fmt: skip
    # Read once more, so that the rows' places are worked out again and do not stay in registers during the loops: with
    # those, two programs of 128 rows and heads of 128 fit a multiprocessor without spilling.
    start = tl.load(query_starts + seq, volatile=True).to(tl.int32)
    first = (tile - (start // TILE_TOKENS + seq)) * TILE_TOKENS
    token = first + row // GROUP
    index = (start + token).to(tl.int64)
    live = (row < TILE_TOKENS * GROUP) & (token < num_queries)
    out_rows = (index * (NUM_KV_HEADS * GROUP) + head) * num_splits + split
    # What an empty run leaves in its part counts nothing.
    written = live & ((num_splits == 1) | (begin < stop))
    store_states(out, lse, out_rows, attended, row_lse, written, live, HEAD_DIM, COLUMNS)
