"""Attention over paged KV where queries are shorter than keys: one launcher for CPU and CUDA."""

from typing import Protocol

from torch import Tensor

from kvtier_kernels.arguments import check_attention, check_index
from kvtier_kernels.attention.attention_cpu import attend_on_cpu
from kvtier_kernels.attention.shared_prefixes import SharedPrefixes
from kvtier_kernels.scoring import PLAIN, Scoring
from kvtier_kernels.tiles import worth_sharing


def paged_attention(
    query: Tensor,
    kv_layer: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    kv_scales: Tensor | None = None,
    window: int | None = None,
    scoring: Scoring = PLAIN,
    max_seq_len: int | None = None,
    num_keys: int | None = None,
    prefixes: SharedPrefixes | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Causal attention of each sequence's newest tokens over all its keys, the new ones included.

    The keys and values of the new tokens must be in their blocks already (`kv_write`). What lies in
    the blocks beyond `seq_lens` never counts, whatever it is. The result depends on the values only, not on
    which physical blocks hold them: bit for bit the same for the same lengths, hints
    and `prefixes`.

    Tensors on CPU go through torch's fused attention, tensors on CUDA through the Triton kernels: `paged_decode`
    when every sequence has one query (`shared_prefix_decode` where `prefixes` are given), `prefix_prefill` otherwise.
    Which it is follows from the shapes, so that nothing waits for the device. For the same reason values on a CUDA
    device are not checked: block ids there must exist.

    :param query: `[num_tokens, num_heads, head_dim]`, the sequences one after the other.
    :param kv_layer: `[num_blocks, 2, tokens_per_block, num_kv_heads, head_dim]`, one layer's view of the paged KV, of
        query's dtype, or int8 or float8_e4m3fn, where a value is what is stored times its scale.
    :param block_tables: int32 or int64 `[num_seqs, max_blocks]`; entries beyond a sequence's blocks are not read, nor
        those wholly before what `window` lets its queries see.
    :param query_starts: int32 or int64 `[num_seqs + 1]`, from 0 to num_tokens, strictly rising.
    :param seq_lens: int32 or int64 `[num_seqs]`, keys of each sequence; at least its number of queries.
    :param scale: factor on the scores, usually `head_dim ** -0.5`; positive.
    :param kv_scales: float32 `[num_blocks, 2, tokens_per_block, num_kv_heads]`, a scale per token and head, of which
        only the block stride is free; int8 needs it. For float8_e4m3fn also `[2]`, one for keys and one for values,
        or None, which stands for 1. All are positive.
    :param window: a query sees this many keys, its own and those right before; all when None.
    :param scoring: what becomes of scores before the softmax.
    :param max_seq_len: no sequence has more keys. Only a hint for how work is split; what `block_tables` has room for
        when None.
    :param num_keys: of all sequences together. Only a hint, likewise; all have as many when None.
    :param prefixes: what `find_shared_prefixes` says of this batch, whose sequences have one query each. Only how it is
        computed depends on it. Not used on CPU, nor with `window` or slopes.
    :param lse: float32 `[num_tokens, num_heads]`, contiguous; takes the natural log-sum-exp of each query's scores,
        the sink among them; -inf where it saw no key and there is no sink.
    :returns: `[num_tokens, num_heads, head_dim]`, contiguous, of query's dtype.
    :raises ValueError: on a wrong shape, dtype, stride or device, or, on CPU, on lengths that do not fit.
    """
    if kv_layer.device.type != "cpu":
        return attend_with_triton(
            query, kv_layer, block_tables, query_starts, seq_lens,
            scale=scale, kv_scales=kv_scales, window=window, scoring=scoring,
            max_seq_len=max_seq_len, num_keys=num_keys, prefixes=prefixes, lse=lse,
        )  # fmt: skip
    check_attention(
        query, kv_layer, block_tables, seq_lens,
        scale=scale, kv_scales=kv_scales, window=window, scoring=scoring,
        max_seq_len=max_seq_len, num_keys=num_keys, lse=lse,
    )  # fmt: skip
    check_index("query_starts", query_starts, (seq_lens.size(0) + 1,), kv_layer.device)
    return attend_on_cpu(
        query, kv_layer, block_tables, query_starts, seq_lens,
        scale=scale, kv_scales=kv_scales, window=window, scoring=scoring, lse=lse,
    )  # fmt: skip


class AttentionPlan(Protocol):
    """How attention of a batch is computed: checked and chosen once, for all layers of a model."""

    def run(
        self, query: Tensor, kv_layer: Tensor, kv_scales: Tensor | None = None, lse: Tensor | None = None
    ) -> Tensor:
        """`paged_attention` of one layer. Checks nothing: the caller knows that the tensors have the shapes, strides,
        dtypes and devices of those that the plan was made for."""
        ...


def attend_with_triton(
    query: Tensor,
    kv_layer: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    kv_scales: Tensor | None = None,
    window: int | None = None,
    scoring: Scoring = PLAIN,
    max_seq_len: int | None = None,
    num_keys: int | None = None,
    prefixes: SharedPrefixes | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """`paged_attention` through the Triton kernels, whose launchers check what they are given."""
    plan = plan_with_triton(
        query, kv_layer, block_tables, query_starts, seq_lens,
        scale=scale, kv_scales=kv_scales, window=window, scoring=scoring,
        max_seq_len=max_seq_len, num_keys=num_keys, prefixes=prefixes, lse=lse,
    )  # fmt: skip
    return plan.run(query, kv_layer, kv_scales, lse)


def plan_with_triton(
    query: Tensor,
    kv_layer: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    kv_scales: Tensor | None = None,
    window: int | None = None,
    scoring: Scoring = PLAIN,
    max_seq_len: int | None = None,
    num_keys: int | None = None,
    prefixes: SharedPrefixes | None = None,
    lse: Tensor | None = None,
) -> AttentionPlan:
    """Checks the arguments of `paged_attention` and chooses the Triton kernels that compute it.

    :raises ValueError: on a wrong shape, dtype, stride or device.
    """
    # Imported here: triton is not needed, and not everywhere to be had, where the engine runs on CPU.
    from kvtier_kernels.attention.paged_decode import plan_decode
    from kvtier_kernels.attention.prefix_prefill import plan_prefill
    from kvtier_kernels.attention.shared_prefix_decode import plan_shared_decode

    if prefixes is not None and window is None and scoring.alibi_slopes is None:
        return plan_shared_decode(
            query, kv_layer, block_tables, seq_lens, prefixes,
            scale=scale, kv_scales=kv_scales, scoring=scoring, lse=lse,
        )  # fmt: skip
    # As many queries as sequences, none without a query: one each.
    if query.size(0) == seq_lens.size(0):
        return plan_decode(
            query, kv_layer, block_tables, seq_lens,
            scale=scale, kv_scales=kv_scales, window=window, scoring=scoring,
            max_seq_len=max_seq_len, num_keys=num_keys, lse=lse,
        )  # fmt: skip
    return plan_prefill(
        query, kv_layer, block_tables, query_starts, seq_lens,
        scale=scale, kv_scales=kv_scales, window=window, scoring=scoring, max_seq_len=max_seq_len, lse=lse,
    )  # fmt: skip


def find_shared_prefixes(
    block_tables: Tensor, seq_lens: Tensor, kv_layer: Tensor, num_heads: int, *, replayed: bool = False
) -> SharedPrefixes | None:
    """What `paged_attention` takes as `prefixes` for a batch with one query per sequence, in all layers.

    Takes time on the host in proportion to the size of `block_tables`, where the sequences are so long that it may be
    worth while: once per step, not per layer.

    :param block_tables: as given to `paged_attention`, but on CPU; `seq_lens` likewise.
    :param kv_layer: any layer's.
    :param num_heads: of the queries.
    :param replayed: without prefixes, the step would be replayed from a CUDA graph.
    :returns: on `kv_layer`'s device; None where it would take no less time, and always on CPU.
    """
    if kv_layer.device.type == "cpu" or len(seq_lens) == 0:
        return None
    _, _, tokens_per_block, num_kv_heads, head_dim = kv_layer.shape
    key_bytes, num_rows = 2 * num_kv_heads * head_dim * kv_layer.element_size(), len(seq_lens) * num_heads

    def pays(num_saved_keys: int) -> bool:
        return worth_sharing(num_saved_keys, key_bytes, num_rows, head_dim, replayed=replayed)

    if not pays(int(seq_lens.sum() - seq_lens.max())):  # as much as if one sequence began with each other one
        return None
    found = SharedPrefixes.of(block_tables, seq_lens, tokens_per_block)
    return found.to(kv_layer.device) if pays(found.num_saved_keys) else None
