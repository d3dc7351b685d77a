"""Attention over paged keys, shared by prefill and decode: tiles of keys into an online softmax.

The softmax is kept as in FlashAttention (Dao et al., 2022): the largest score so far, the sum of weights relative
to it, and the weighted sum of values. Scores are in base 2, so that a weight is one `exp2`.

Quantised keys and values are converted to the queries' dtype as they are, so that products run on the tensor cores in
16 bits. Where each has a scale of its own, a key's multiplies its scores and a value's its weights: a number per key,
not per element.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_keys(
    q, kv, kv_scales, kv_head, block_table, begin, all_from, all_to, low, stop, position, head, live,
    alibi_slopes, sinks,
    score_scale, block_stride, scales_stride,
    HEAD_DIM: tl.constexpr, NUM_KV_HEADS: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, PER_KEY_SCALES: tl.constexpr,
    ALL_MASKED: tl.constexpr = False,
):  # fmt: skip
    """Attention of a tile of queries over a run of keys: `[rows, COLUMNS]`, and its natural log-sum-exp, `[rows]`.

    A row that saw no key gets 0, and its sink or -inf. `position`, `low` and `stop` are as in `_attend_tile`.

    kv: at the first key of block 0. kv_scales: with PER_KEY_SCALES at the scale of that key, else one for keys and one
    for values, or None.
    head: `[rows]`, the query head of each row that is `live`.
    alibi_slopes, sinks: float32 `[num_heads]`, as in `scoring.Scoring`, or None.
    begin: the first key of the run, a multiple of KEYS or the start of a block; `stop` ends it.
    all_from, all_to: keys between these, whole tiles of them, are seen by every row, and need no mask. Without WINDOW,
    `all_from` is `begin`. With ALL_MASKED both are: every tile of keys goes through the same instructions, whichever
    rows see it, and one that a row does not see leaves that row's state as it is, bit for bit.
    """
    kv += kv_head * HEAD_DIM
    if PER_KEY_SCALES:
        kv_scales += kv_head
    elif kv_scales is not None:
        score_scale *= tl.load(kv_scales)
    weighted = tl.zeros([q.shape[0], COLUMNS], dtype=tl.float32)
    total = tl.zeros([q.shape[0]], dtype=tl.float32)
    peak = tl.full([q.shape[0]], float("-inf"), dtype=tl.float32)
    slope = alibi_slopes
    if alibi_slopes is not None:
        slope = tl.load(alibi_slopes + head, mask=live, other=0.0) * _LOG2_E
    if sinks is not None:
        peak = tl.load(sinks + head, mask=live, other=0.0) * _LOG2_E
        total += 1.0
    if not ALL_MASKED:
        if WINDOW is not None:
            weighted, total, peak = _attend_run(
                weighted, total, peak, q, kv, kv_scales, block_table, begin, all_from, low, stop, position, slope,
                score_scale, block_stride, scales_stride,
                HEAD_DIM, NUM_KV_HEADS, TOKENS_PER_BLOCK, WINDOW, SOFT_CAP, KEYS, COLUMNS, PER_KEY_SCALES, True,
            )  # fmt: skip
        weighted, total, peak = _attend_run(
            weighted, total, peak, q, kv, kv_scales, block_table, all_from, all_to, low, stop, position, slope,
            score_scale, block_stride, scales_stride,
            HEAD_DIM, NUM_KV_HEADS, TOKENS_PER_BLOCK, WINDOW, SOFT_CAP, KEYS, COLUMNS, PER_KEY_SCALES, False,
        )  # fmt: skip
    # For one query, once or never. Outside of a loop, the compiler would keep a second copy of q in registers that are
    # not there.
    weighted, total, peak = _attend_run(
        weighted, total, peak, q, kv, kv_scales, block_table, all_to, stop, low, stop, position, slope,
        score_scale, block_stride, scales_stride,
        HEAD_DIM, NUM_KV_HEADS, TOKENS_PER_BLOCK, WINDOW, SOFT_CAP, KEYS, COLUMNS, PER_KEY_SCALES, True,
    )  # fmt: skip
    attended, lse = _finish(weighted, total, peak)
    if kv_scales is not None and not PER_KEY_SCALES:
        attended *= tl.load(kv_scales + 1)
    return attended, lse


@triton.jit
def store_states(out, out_lse, rows, attended, lse, written, live, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """What `attend_keys` returns, into `out` where `written`, and into `out_lse`, which may be None, where `live`.

    rows: int64 `[rows]`, the place of each row in `out`, HEAD_DIM elements each, and in `out_lse`.
    """
    column = tl.arange(0, COLUMNS)
    offsets = (rows * HEAD_DIM)[:, None] + column[None, :]
    mask = written[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(out + offsets, attended.to(out.dtype.element_ty), mask=mask)
    if out_lse is not None:
        tl.store(out_lse + rows, lse, mask=live)


@triton.jit
def _attend_run(
    weighted, total, peak,
    q, kv, kv_scales, block_table, begin, end, low, stop, position, slope, score_scale, block_stride, scales_stride,
    HEAD_DIM: tl.constexpr, NUM_KV_HEADS: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, PER_KEY_SCALES: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Takes the tiles of keys that start at `begin`, as in `attend_keys`, and before `end` into the softmax.

    Returns the new (weighted, total, peak). The other arguments are those of `_attend_tile`, and:

    kv_scales: with PER_KEY_SCALES, at the scale of this KV head's first key in block 0.

    The block ids of a tile, and its scales, are loaded an iteration ahead: keys wait for nothing but themselves, and
    the compiler may have as many tiles of them on their way as `num_stages` asks for.
    """
    blocks = _blocks_of_tile(block_table, begin, low, stop, TOKENS_PER_BLOCK, WINDOW, KEYS)
    key_scales, value_scales = _scales_of_tile(
        kv_scales, blocks, begin, low, stop, scales_stride, NUM_KV_HEADS, TOKENS_PER_BLOCK, WINDOW, KEYS, PER_KEY_SCALES
    )
    for first_key in range(begin, end, KEYS):
        next_key = first_key + KEYS
        next_blocks = _blocks_of_tile(block_table, next_key, low, stop, TOKENS_PER_BLOCK, WINDOW, KEYS)
        next_key_scales, next_value_scales = _scales_of_tile(
            kv_scales, next_blocks, next_key, low, stop, scales_stride,
            NUM_KV_HEADS, TOKENS_PER_BLOCK, WINDOW, KEYS, PER_KEY_SCALES,
        )  # fmt: skip
        weighted, total, peak = _attend_tile(
            weighted, total, peak, q, kv, key_scales, value_scales, blocks, first_key, low, stop, position, slope,
            score_scale, block_stride,
            HEAD_DIM, NUM_KV_HEADS, TOKENS_PER_BLOCK, WINDOW, SOFT_CAP, KEYS, COLUMNS, PER_KEY_SCALES, MASKED,
        )  # fmt: skip
        blocks = next_blocks
        key_scales = next_key_scales
        value_scales = next_value_scales
    return weighted, total, peak


@triton.jit
def _attend_tile(
    weighted, total, peak, q, kv, key_scales, value_scales, blocks, first_key, low, stop, position, slope,
    score_scale, block_stride,
    HEAD_DIM: tl.constexpr, NUM_KV_HEADS: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, PER_KEY_SCALES: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Takes keys `first_key` to `first_key + KEYS` into the softmax; returns the new (weighted, total, peak).

    kv: at the first key of this KV head in block 0.
    key_scales, value_scales: `[KEYS]`, of these keys and their values; used with PER_KEY_SCALES.
    blocks: of these keys, `[KEYS]`, or one number where they are all in one block.
    position: `[rows]`, where the queries stand. With MASKED, a query sees the keys up to its own, the newest WINDOW
    of them where that is not None. Keys before `low` and from `stop` on, which nobody sees, are not even read: what
    is there may be NaN, which no weight of 0 would remove. Without MASKED, all keys count.
    slope: `[rows]`, what each row's score in base 2 loses per token of distance, or None.
    score_scale: positive, times log2(e).
    """
    key = first_key + tl.arange(0, KEYS)
    column = tl.arange(0, COLUMNS)
    exists = _exists(key, low, stop, WINDOW)
    row = blocks.to(tl.int64) * block_stride + key % TOKENS_PER_BLOCK * (NUM_KV_HEADS * HEAD_DIM)
    keys = kv + row[:, None] + column[None, :]
    k = _load_rows(keys, exists, column, HEAD_DIM, COLUMNS, MASKED)
    scores = tl.dot(q, tl.trans(_as_float(k, q.dtype)), input_precision="ieee")
    if PER_KEY_SCALES:
        scores *= key_scales[None, :]
    if SOFT_CAP is not None or slope is not None:
        scores *= score_scale
        score_scale = 1.0
    if SOFT_CAP is not None:
        # tanh(x) is 1 - 2 / (exp(2 x) + 1).
        scores = SOFT_CAP * _LOG2_E * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / SOFT_CAP)) + 1.0))
    if slope is not None:
        scores -= slope[:, None] * (position[:, None] - key[None, :]).to(tl.float32)
    if MASKED:
        seen = exists[None, :] & (key[None, :] <= position[:, None])
        if WINDOW is not None:
            seen &= key[None, :] > position[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * score_scale)
    base = new_peak
    if MASKED:
        # A row that has seen no key yet: -inf - -inf would be NaN, for good.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores * score_scale - base[:, None])
    shrink = tl.exp2(peak - base)
    total = total * shrink + tl.sum(weights, 1)
    v = _load_rows(keys + TOKENS_PER_BLOCK * NUM_KV_HEADS * HEAD_DIM, exists, column, HEAD_DIM, COLUMNS, MASKED)
    if PER_KEY_SCALES:
        weights *= value_scales[None, :]
    weighted = tl.dot(weights.to(q.dtype), _as_float(v, q.dtype), weighted * shrink[:, None], input_precision="ieee")
    return weighted, total, new_peak


@triton.jit
def _finish(weighted, total, peak):
    """The attention, and its natural log-sum-exp; 0 and -inf for a row that saw no key."""
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), (peak + tl.log2(divisor)) * 0.6931471805599453)
    return weighted / divisor[:, None], lse


@triton.jit
def _exists(key, low, stop, WINDOW: tl.constexpr):
    if WINDOW is None:
        return key < stop
    return (key >= low) & (key < stop)


@triton.jit
def _blocks_of_tile(
    block_table, first_key, low, stop, TOKENS_PER_BLOCK: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr
):
    """What `_attend_tile` takes as `blocks`. Entries whose keys are all before `low` or from `stop` on are not read."""
    if TOKENS_PER_BLOCK % KEYS == 0:
        return tl.load(block_table + first_key // TOKENS_PER_BLOCK, mask=first_key < stop, other=0)
    else:  # noqa: RET505  # for Triton: the two differ in type
        key = first_key + tl.arange(0, KEYS)
        return tl.load(block_table + key // TOKENS_PER_BLOCK, mask=_exists(key, low, stop, WINDOW), other=0)


@triton.jit
def _scales_of_tile(
    kv_scales, blocks, first_key, low, stop, scales_stride,
    NUM_KV_HEADS: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr,
    PER_KEY_SCALES: tl.constexpr,
):  # fmt: skip
    """What `_attend_tile` takes as `key_scales` and `value_scales`."""
    if PER_KEY_SCALES:
        key = first_key + tl.arange(0, KEYS)
        exists = _exists(key, low, stop, WINDOW)
        scales = kv_scales + blocks.to(tl.int64) * scales_stride + key % TOKENS_PER_BLOCK * NUM_KV_HEADS
        key_scales = tl.load(scales, mask=exists, other=0.0)
        return key_scales, tl.load(scales + TOKENS_PER_BLOCK * NUM_KV_HEADS, mask=exists, other=0.0)
    else:  # noqa: RET505  # for Triton: the two differ in type
        return 1.0, 1.0


@triton.jit
def _load_rows(rows, exists, column, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(rows, mask=exists[:, None] & (column < HEAD_DIM)[None, :], other=0.0)
    if HEAD_DIM != COLUMNS:
        return tl.load(rows, mask=(column < HEAD_DIM)[None, :], other=0.0)
    return tl.load(rows)


@triton.jit
def _as_float(stored, dtype: tl.constexpr):
    """Quantised keys or values in the queries' dtype, which holds each of them exactly.

    stored: float8_e4m3fn where it is uint8.
    """
    if stored.dtype == dtype:
        return stored
    if stored.dtype == tl.uint8:
        # The bits of a float16 with an exponent that is 8 too small. Chips before 8.9 know no float8.
        bits = stored.to(tl.int16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return (bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(dtype)
    return stored.to(tl.float32).to(dtype)
