"""Attention of one new token per sequence over all its keys, as Triton kernels.

A batch of few sequences would leave most of the chip idle, so each sequence's keys are cut into runs, and the runs'
results merged by their log-sum-exps (flash decoding, Dao et al., 2023).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels.arguments import check_attention, check_lse
from kvtier_kernels.launching import (
    capability,
    check_attention_limits,
    check_launchable,
    check_tile,
    num_multiprocessors,
    on_device_of,
)
from kvtier_kernels.merge_states import merge_states
from kvtier_kernels.paged_softmax import attend_tile, finish
from kvtier_kernels.tiles import Tile, decode_splits, decode_tile, padded_head_dim


def paged_decode(
    query: Tensor,
    kv_layer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    max_seq_len: int | None = None,
    num_splits: int | None = None,
    lse: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Attention as `kvtier_kernels.attention.paged_attention` for batches with one query per sequence.

    Waits for nothing: values on the device are not looked at. Block ids must exist; a sequence without keys gets
    zeros; `seq_lens` beyond what `block_tables` has room for are cut.

    :param query: `[num_seqs, num_heads, head_dim]`.
    :param max_seq_len: decides with the shapes how many runs there are. Too small or too large costs time only.
    :param num_splits: that number itself; `tiles.decode_splits` chooses when None.
    :param lse: float32 `[num_seqs, num_heads]`, takes the natural log-sum-exp of the scores, -inf without keys.
    :param tile: what `tiles.decode_tile` chooses when None.
    :raises ValueError: on a wrong shape, dtype, stride or device, or heads that do not fit the chip's shared memory.
    """
    check_launchable("kv_layer", kv_layer, _decode_kernel)
    check_attention(query, kv_layer, block_tables, seq_lens)
    check_attention_limits(query, kv_layer)
    num_seqs, num_heads, head_dim = query.shape
    if seq_lens.size(0) != num_seqs:
        raise ValueError(f"{num_seqs} queries for {seq_lens.size(0)} sequences: needs one each")
    if lse is not None:
        check_lse(lse, query)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if num_seqs == 0:
        return out
    _, _, tokens_per_block, num_kv_heads, _ = kv_layer.shape
    table_width = block_tables.size(1)
    room = table_width * tokens_per_block
    if num_splits is None:
        max_keys = room if max_seq_len is None else min(max_seq_len, room)
        num_splits = decode_splits(num_seqs * num_kv_heads, max_keys, num_multiprocessors(query.device))
    elif not 1 <= num_splits <= 1024:
        raise ValueError(f"num_splits is {num_splits}: needs 1 to 1024")
    group, chip = num_heads // num_kv_heads, capability(query.device)
    if tile is None:
        tile = decode_tile(head_dim, query.element_size(), group, chip)
    check_tile(tile, query, kv_layer, chip)
    parts, part_lse = out, lse
    if num_splits > 1:
        parts = torch.empty((num_seqs, num_heads, num_splits, head_dim), dtype=torch.float32, device=query.device)
        part_lse = torch.empty((num_seqs, num_heads, num_splits), dtype=torch.float32, device=query.device)
    with on_device_of(query):
        _decode_kernel[(num_seqs, num_kv_heads, num_splits)](
            query, kv_layer, block_tables, seq_lens, parts, part_lse,
            scale * math.log2(math.e), query.stride(0), kv_layer.stride(0), table_width, room, num_splits,
            HEAD_DIM=head_dim, GROUP=group, NUM_KV_HEADS=num_kv_heads, TOKENS_PER_BLOCK=tokens_per_block,
            ROWS=tile.rows, KEYS=tile.keys, COLUMNS=padded_head_dim(head_dim),
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    if parts is not out and part_lse is not None:
        merge_states(parts, part_lse, out, lse)
    return out


@triton.jit(do_not_specialize=["table_width", "max_keys", "num_splits"])
def _decode_kernel(
    query, kv, block_tables, seq_lens, out, lse,
    score_scale, query_stride, block_stride, table_width, max_keys, num_splits,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out: `[num_seqs, num_heads, num_splits, HEAD_DIM]`, lse: `[num_seqs, num_heads, num_splits]` or None."""
    seq = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.minimum(tl.load(seq_lens + seq), max_keys).to(tl.int32)
    # Runs of whole tiles, so that only the last one ends inside a tile. Those beyond it are empty.
    run = tl.cdiv(tl.cdiv(seq_len, num_splits), KEYS) * KEYS
    first = split * run
    stop = tl.minimum(first + run, seq_len)
    whole = first + tl.maximum(stop - first, 0) // KEYS * KEYS

    row = tl.arange(0, ROWS)
    head = kv_head * GROUP + row
    column = tl.arange(0, COLUMNS)
    live = row < GROUP
    live_elements = live[:, None] & (column < HEAD_DIM)[None, :]
    query_offsets = seq.to(tl.int64) * query_stride + (head * HEAD_DIM)[:, None] + column[None, :]
    q = tl.load(query + query_offsets, mask=live_elements, other=0.0)

    kv_row: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    head_kv = kv + kv_head * HEAD_DIM
    block_table = block_tables + seq.to(tl.int64) * table_width
    position = tl.zeros([ROWS], dtype=tl.int32) + seq_len
    weighted = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    peak = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    for first_key in range(first, whole, KEYS):
        weighted, total, peak = attend_tile(
            weighted, total, peak, q, head_kv, block_table, first_key, stop, position, score_scale, block_stride,
            HEAD_DIM, kv_row, TOKENS_PER_BLOCK, KEYS, COLUMNS, False,
        )  # fmt: skip
    # Once or never. Outside of a loop, the compiler would keep a second copy of q in registers that are not there.
    for tail_key in range(whole, stop, KEYS):
        weighted, total, peak = attend_tile(
            weighted, total, peak, q, head_kv, block_table, tail_key, stop, position, score_scale, block_stride,
            HEAD_DIM, kv_row, TOKENS_PER_BLOCK, KEYS, COLUMNS, True,
        )  # fmt: skip
    attended, row_lse = finish(weighted, total, peak)
    out_rows = (seq.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head) * num_splits + split
    out_offsets = (out_rows * HEAD_DIM)[:, None] + column[None, :]
    tl.store(out + out_offsets, attended.to(out.dtype.element_ty), mask=live_elements)
    if lse is not None:
        tl.store(lse + out_rows, row_lse, mask=live)
