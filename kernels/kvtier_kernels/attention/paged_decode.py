"""Attention of one new token per sequence over all its keys, as Triton kernels.

A batch of few sequences would leave most of the chip idle, so each sequence's keys are cut into runs, and the runs'
results merged by their log-sum-exps (flash decoding, Dao et al., 2023).
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
from kvtier_kernels.tiles import Tile, decode_runs, decode_tile, padded_head_dim


def paged_decode(
    query: Tensor,
    kv_layer: Tensor,
    batch: AttentionBatch,
    kv_scales: Tensor | None = None,
    lse: Tensor | None = None,
    *,
    num_splits: int | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Attention as `kvtier_kernels.attention.paged_attention.paged_attention` for batches with one query per sequence.

    Waits for nothing: values on the device are not looked at. Block ids must exist; a sequence without keys gets
    zeros; `seq_lens` beyond what `block_tables` has room for are cut.

    :param batch: it and its `check` describe the arguments. `query_starts` and `prefixes` are not used; `max_seq_len`,
        `num_keys` and the shapes decide into how many runs keys are cut.
    :param num_splits: into how many runs each sequence is cut; `tiles.decode_runs` chooses when None.
    :param tile: what `tiles.decode_tile` chooses when None.
    :raises ValueError: on a wrong shape, dtype, stride or device, or heads that do not fit the chip's shared memory.
    """
    plan = plan_decode(query, kv_layer, batch, kv_scales, lse, num_splits=num_splits, tile=tile)
    return plan.run(query, kv_layer, kv_scales, lse)


@dataclass(frozen=True, slots=True, eq=False)
class DecodePlan:
    """How `paged_decode` computes a batch: checked and chosen once, for all layers of a model."""

    batch: AttentionBatch
    num_splits: int
    run_keys: int
    tile: Tile

    def run(
        self, query: Tensor, kv_layer: Tensor, kv_scales: Tensor | None = None, lse: Tensor | None = None
    ) -> Tensor:
        """`paged_decode` of one layer. Checks nothing: the caller knows that the tensors have the shapes, strides,
        dtypes and devices of those that the plan was made for."""
        out = query.new_empty(query.shape)
        if query.size(0) == 0:
            return out
        batch, whole = self.batch, self.num_splits == 1
        scoring = batch.scoring if whole else batch.scoring.without_sinks()
        parts, part_lse = (out, lse) if whole else empty_states(query, self.num_splits)
        launch_decode(
            query, kv_layer, kv_scales, batch, None, parts, part_lse,
            scoring=scoring, num_splits=self.num_splits, run_keys=self.run_keys, tile=self.tile,
        )  # fmt: skip
        if not whole and part_lse is not None:
            launch_merge(parts, part_lse, out, lse, batch.scoring.sinks)
        return out


def plan_decode(
    query: Tensor,
    kv_layer: Tensor,
    batch: AttentionBatch,
    kv_scales: Tensor | None = None,
    lse: Tensor | None = None,
    *,
    num_splits: int | None = None,
    run_keys: int = 1,
    tile: Tile | None = None,
) -> DecodePlan:
    """Checks the arguments of `paged_decode`, which describes them, and chooses how they are computed.

    :param run_keys: beside `num_splits`: sequences are cut into fewer runs where none need have more keys than this.
    :raises ValueError: as `paged_decode` does.
    """
    check_launchable("kv_layer", kv_layer, _decode_kernel)
    batch.check(query, kv_layer, kv_scales, lse)
    check_attention_limits(query, kv_layer)
    num_seqs, num_heads, head_dim = query.shape
    if batch.seq_lens.size(0) != num_seqs:
        raise ValueError(f"{num_seqs} queries for {batch.seq_lens.size(0)} sequences: needs one each")
    check_block_ids(kv_layer, batch.block_tables, batch.seq_lens, None, batch.window)
    _, _, tokens_per_block, num_kv_heads, _ = kv_layer.shape
    if num_splits is None:
        room = batch.block_tables.size(1) * tokens_per_block
        max_keys = min(number for number in (room, batch.max_seq_len, batch.window) if number is not None)
        mean_keys = max_keys if batch.num_keys is None else min(batch.num_keys // max(1, num_seqs), max_keys)
        num_splits, run_keys = decode_runs(
            num_seqs * num_kv_heads, mean_keys, max_keys, num_multiprocessors(query.device)
        )
    elif not 1 <= num_splits <= 1024:
        raise ValueError(f"num_splits is {num_splits}: needs 1 to 1024")
    group, chip = num_heads // num_kv_heads, capability(query.device)
    if tile is None:
        tile = decode_tile(head_dim, query.element_size(), group, chip, kv_bytes=kv_layer.element_size())
    check_tile(tile, query, kv_layer, chip)
    return DecodePlan(batch, num_splits, run_keys, tile)


def launch_decode(
    query: Tensor,
    kv_layer: Tensor,
    kv_scales: Tensor | None,
    batch: AttentionBatch,
    own_starts: Tensor | None,
    parts: Tensor,
    part_lse: Tensor | None,
    *,
    scoring: Scoring,
    num_splits: int,
    run_keys: int,
    first_state: int = 0,
    tile: Tile,
) -> None:
    """Attention in up to `num_splits` runs of keys for each sequence, of arguments that have been checked.

    :param run_keys: no more runs than it takes for none to have more keys than this, or a tile more.
    :param own_starts: int32 `[num_seqs]`, the first key of each sequence to look at, at the start of a block; the first
        of all when None. Not together with the batch's `window`.
    :param parts: `[num_seqs, num_heads, num_states, head_dim]`, the runs' results from state `first_state` on; or
        `[num_seqs, num_heads, head_dim]` for one run.
    :param part_lse: float32, `parts` without its last dimension.
    :param scoring: the batch's, or that of one of several runs.
    """
    num_seqs, num_heads, head_dim = query.shape
    _, _, tokens_per_block, num_kv_heads, _ = kv_layer.shape
    block_tables, table_width = batch.block_tables, batch.block_tables.size(1)
    scales_stride = per_key_stride(kv_scales)
    with on_device_of(query):
        _decode_kernel[(num_seqs * num_kv_heads, num_splits)](
            query, stored_values(kv_layer, capability(query.device)), kv_scales,
            block_tables, batch.seq_lens, own_starts, scoring.alibi_slopes, scoring.sinks, parts, part_lse,
            batch.scale * math.log2(math.e), query.stride(0), kv_layer.stride(0), scales_stride or 0,
            table_width, table_width * tokens_per_block, run_keys, first_state, parts.numel() // query.numel(),
            HEAD_DIM=head_dim, GROUP=num_heads // num_kv_heads, NUM_KV_HEADS=num_kv_heads,
            TOKENS_PER_BLOCK=tokens_per_block, WINDOW=batch.window, SOFT_CAP=scoring.soft_cap,
            ROWS=tile.rows, KEYS=tile.keys, COLUMNS=padded_head_dim(head_dim), PER_KEY_SCALES=scales_stride is not None,
            num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=FUSE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["table_width", "max_keys", "run_keys", "first_state", "num_states"])
def _decode_kernel(
    query, kv, kv_scales, block_tables, seq_lens, own_starts, alibi_slopes, sinks, out, lse,
    score_scale, query_stride, block_stride, scales_stride, table_width, max_keys, run_keys, first_state, num_states,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    PER_KEY_SCALES: tl.constexpr,
):  # fmt: skip
    """out: `[num_seqs, num_heads, num_states, HEAD_DIM]`, lse: `[num_seqs, num_heads, num_states]` or None."""
    # Heads of one sequence side by side: what they read lies side by side.
    seq = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    split = tl.program_id(1)
    seq_len = tl.minimum(tl.load(seq_lens + seq), max_keys).to(tl.int32)
    low = tl.zeros([], tl.int32)
    if own_starts is not None:
        low = tl.load(own_starts + seq)
    # Runs of whole tiles, so that only the first one begins and only the last one ends inside a tile. Runs beyond
    # it are empty.
    first = low
    if WINDOW is not None:
        low = tl.maximum(seq_len - WINDOW, 0)
        first = low // KEYS * KEYS
    num_keys = tl.maximum(seq_len - first, 0)
    num_runs = tl.minimum(tl.cdiv(tl.maximum(num_keys, 1), run_keys), tl.num_programs(1))
    run = tl.cdiv(tl.cdiv(num_keys, num_runs), KEYS) * KEYS
    first += split * run
    stop = tl.minimum(first + run, seq_len)
    whole_from = first
    if WINDOW is not None:
        whole_from += KEYS * (first < low).to(tl.int32)
    whole_to = tl.maximum(first + tl.maximum(stop - first, 0) // KEYS * KEYS, whole_from)

    row = tl.arange(0, ROWS)
    head = kv_head * GROUP + row
    live = row < GROUP
    if lse is not None:  # noqa: SIM102  # the one is for the compiler, the other for the device
        if (split > 0) & (first >= stop):
            empty = _state_rows(seq, head, split, first_state, num_states, NUM_KV_HEADS * GROUP)
            tl.store(lse + empty, float("-inf"), mask=live)
            return
    column = tl.arange(0, COLUMNS)
    live_elements = live[:, None] & (column < HEAD_DIM)[None, :]
    query_offsets = seq.to(tl.int64) * query_stride + (head * HEAD_DIM)[:, None] + column[None, :]
    q = tl.load(query + query_offsets, mask=live_elements, other=0.0)

    position = tl.zeros([ROWS], dtype=tl.int32) + (seq_len - 1)
    attended, row_lse = attend_keys(
        q, kv, kv_scales, kv_head, block_tables + seq.to(tl.int64) * table_width,
        first, whole_from, whole_to, low, stop, position, head, live,
        alibi_slopes, sinks, score_scale, block_stride, scales_stride,
        HEAD_DIM, NUM_KV_HEADS, TOKENS_PER_BLOCK, WINDOW, SOFT_CAP, KEYS, COLUMNS, PER_KEY_SCALES,
    )  # fmt: skip
    out_rows = _state_rows(seq, head, split, first_state, num_states, NUM_KV_HEADS * GROUP)
    store_states(out, lse, out_rows, attended, row_lse, live, live, HEAD_DIM, COLUMNS)


@triton.jit
def _state_rows(seq, head, split, first_state, num_states, NUM_HEADS: tl.constexpr):
    """Returns where the states of a run are, for each head."""
    return (seq.to(tl.int64) * NUM_HEADS + head) * num_states + first_state + split
