"""Attention of new tokens over a cached prefix and themselves, as a Triton kernel.

A program takes a tile of one sequence's queries with all query heads of one KV head, folded into rows, so that keys
are read once for the group. Tiles are numbered over the whole batch: sequence i owns the numbers from
`query_starts[i] // tokens_per_tile + i` on. Thereby the grid follows from shapes alone, and short sequences beside
a long one cost a program each, not as many as the longest has (the numbering is that of vLLM's
`triton_unified_attention.py`).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels.arguments import check_attention, check_index, check_lse
from kvtier_kernels.launching import capability, check_attention_limits, check_launchable, check_tile, on_device_of
from kvtier_kernels.paged_softmax import attend_tile, finish
from kvtier_kernels.tiles import Tile, padded_head_dim, prefill_tile


def prefix_prefill(
    query: Tensor,
    kv_layer: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    lse: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Causal attention as `kvtier_kernels.attention.paged_attention`, which describes the arguments.

    Waits for nothing: values on the device are not looked at. Block ids must exist; a sequence with fewer keys than
    queries gets zeros where a query sees no key; `seq_lens` beyond what `block_tables` has room for are cut.
    Scores, softmax and sums are in float32, products in the dtype of the inputs.

    :param lse: float32 `[num_tokens, num_heads]`, takes the natural log-sum-exp of each query's scores, -inf where
        it saw no key.
    :param tile: what `tiles.prefill_tile` chooses when None.
    :raises ValueError: on a wrong shape, dtype, stride or device, or heads that do not fit the chip's shared memory.
    """
    check_launchable("kv_layer", kv_layer, _prefill_kernel)
    check_attention(query, kv_layer, block_tables, seq_lens)
    check_attention_limits(query, kv_layer)
    num_seqs, table_width = block_tables.shape
    check_index("query_starts", query_starts, (num_seqs + 1,), kv_layer.device)
    if lse is not None:
        check_lse(lse, query)
    num_tokens, num_heads, head_dim = query.shape
    _, _, tokens_per_block, num_kv_heads, _ = kv_layer.shape
    group, chip = num_heads // num_kv_heads, capability(query.device)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if num_tokens == 0 or num_seqs == 0:
        return out
    if tile is None:
        tile = prefill_tile(head_dim, query.element_size(), group, chip)
    check_tile(tile, query, kv_layer, chip)
    tile_tokens = tile.rows // group
    with on_device_of(query):
        _prefill_kernel[(num_tokens // tile_tokens + num_seqs, num_kv_heads)](
            query, kv_layer, block_tables, query_starts, seq_lens, out, lse,
            scale * math.log2(math.e), query.stride(0), kv_layer.stride(0),
            table_width, table_width * tokens_per_block, num_seqs,
            HEAD_DIM=head_dim, GROUP=group, NUM_KV_HEADS=num_kv_heads, TOKENS_PER_BLOCK=tokens_per_block,
            TILE_TOKENS=tile_tokens, ROWS=tile.rows, KEYS=tile.keys, COLUMNS=padded_head_dim(head_dim),
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return out


@triton.jit
def _sequence_of_tile(query_starts, tile, num_seqs, TILE_TOKENS: tl.constexpr):
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
@triton.jit(do_not_specialize=["table_width", "max_keys", "num_seqs"])
def _prefill_kernel(
    query, kv, block_tables, query_starts, seq_lens, out, lse,
    score_scale, query_stride, block_stride, table_width, max_keys, num_seqs,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr,
    TILE_TOKENS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = _sequence_of_tile(query_starts, tile, num_seqs, TILE_TOKENS)
    start = tl.load(query_starts + seq).to(tl.int32)
    num_queries = tl.load(query_starts + seq + 1).to(tl.int32) - start
    first = (tile - (start // TILE_TOKENS + seq)) * TILE_TOKENS
    if first >= num_queries:
        return
    seq_len = tl.minimum(tl.load(seq_lens + seq), max_keys).to(tl.int32)
    before = seq_len - num_queries  # keys older than the first query

    row = tl.arange(0, ROWS)
    token = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    column = tl.arange(0, COLUMNS)
    live = (row < TILE_TOKENS * GROUP) & (token < num_queries)
    live_elements = live[:, None] & (column < HEAD_DIM)[None, :]
    index = (start + token).to(tl.int64)
    query_offsets = (index * query_stride + head * HEAD_DIM)[:, None] + column[None, :]
    q = tl.load(query + query_offsets, mask=live_elements, other=0.0)

    kv_row: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    head_kv = kv + kv_head * HEAD_DIM
    block_table = block_tables + seq.to(tl.int64) * table_width
    position = before + token
    weighted = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    peak = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    # Up to here every query of the tile sees every key; from there on to `stop` only some do.
    seen_by_all = tl.maximum(before + first + 1, 0) // KEYS * KEYS
    stop = before + tl.minimum(first + TILE_TOKENS, num_queries)
    for first_key in range(0, seen_by_all, KEYS):
        weighted, total, peak = attend_tile(
            weighted, total, peak, q, head_kv, block_table, first_key, stop, position, score_scale, block_stride,
            HEAD_DIM, kv_row, TOKENS_PER_BLOCK, KEYS, COLUMNS, False,
        )  # fmt: skip
    for first_key in range(seen_by_all, stop, KEYS):
        weighted, total, peak = attend_tile(
            weighted, total, peak, q, head_kv, block_table, first_key, stop, position, score_scale, block_stride,
            HEAD_DIM, kv_row, TOKENS_PER_BLOCK, KEYS, COLUMNS, True,
        )  # fmt: skip
    attended, row_lse = finish(weighted, total, peak)
    out_rows = index * (NUM_KV_HEADS * GROUP) + head
    out_offsets = (out_rows * HEAD_DIM)[:, None] + column[None, :]
    tl.store(out + out_offsets, attended.to(out.dtype.element_ty), mask=live_elements)
    if lse is not None:
        tl.store(lse + out_rows, row_lse, mask=live)
