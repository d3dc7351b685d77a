"""One step of attention over paged keys, shared by prefill and decode: a tile of keys into an online softmax.

The softmax is kept as in FlashAttention (Dao et al., 2022): the largest score so far, the sum of weights relative
to it, and the weighted sum of values. Scores are in base 2, so that a weight is one `exp2`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def attend_tile(
    weighted, total, peak,
    q, kv, block_table, first_key, stop, position, score_scale, block_stride,
    HEAD_DIM: tl.constexpr, KV_ROW: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr,
    KEYS: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Takes keys `first_key` to `first_key + KEYS` into the softmax; returns the new (weighted, total, peak).

    kv: at the first key of this KV head in block 0. KV_ROW: elements between the keys of two tokens.
    position: `[rows]`, where the queries stand; with MASKED, keys after it and from `stop` on do not count and are
    not even read: what is there may be NaN, which no weight of 0 would remove. Without, all of them count.
    """
    key = first_key + tl.arange(0, KEYS)
    column = tl.arange(0, COLUMNS)
    if MASKED:
        block = tl.load(block_table + key // TOKENS_PER_BLOCK, mask=key < stop, other=0)
    else:
        block = tl.load(block_table + key // TOKENS_PER_BLOCK)
    row = block.to(tl.int64) * block_stride + (key % TOKENS_PER_BLOCK) * KV_ROW
    offsets = row[:, None] + column[None, :]
    mask = (key < stop)[:, None] & (column < HEAD_DIM)[None, :]
    if MASKED or HEAD_DIM != COLUMNS:
        k = tl.load(kv + offsets, mask=mask, other=0.0)
    else:
        k = tl.load(kv + offsets)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * score_scale
    if MASKED:
        seen = (key < stop)[None, :] & (key[None, :] <= position[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    # A row that has seen no key yet: -inf - -inf would be NaN, for good.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(peak - base)
    total = total * shrink + tl.sum(weights, 1)
    values = kv + TOKENS_PER_BLOCK * KV_ROW
    if MASKED or HEAD_DIM != COLUMNS:
        v = tl.load(values + offsets, mask=mask, other=0.0)
    else:
        v = tl.load(values + offsets)
    weighted = tl.dot(weights.to(v.dtype), v, weighted * shrink[:, None], input_precision="ieee")
    return weighted, total, new_peak


@triton.jit
def finish(weighted, total, peak):
    """The attention, and its natural log-sum-exp; 0 and -inf for a row that saw no key."""
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), (peak + tl.log2(divisor)) * 0.6931471805599453)
    return weighted / divisor[:, None], lse
