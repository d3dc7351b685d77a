"""Attention over paged KV where queries are shorter than keys: one launcher for CPU and CUDA."""

from torch import Tensor

from kvtier_kernels.arguments import check_attention, check_index
from kvtier_kernels.attention_cpu import attend_on_cpu


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
    max_seq_len: int | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Causal attention of each sequence's newest tokens over all its keys, the new ones included.

    The keys and values of the new tokens must be in their blocks already (`kv_write`). What lies in
    the blocks beyond `seq_lens` never counts, whatever it is. The result depends on the values only, not on
    which physical blocks hold them: bit for bit the same for the same lengths and the same `max_seq_len`.

    Tensors on CPU go through torch's fused attention, tensors on CUDA through the Triton kernels: `paged_decode`
    when every sequence has one query, `prefix_prefill` otherwise. Which it is follows from the shapes, so that
    nothing waits for the device. For the same reason values on a CUDA device are not checked: block ids there must
    exist.

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
        or None, which stands for 1.
    :param window: a query sees this many keys, its own and those right before; all when None.
    :param max_seq_len: no sequence has more keys. Only a hint for how work is split; what `block_tables` has room for
        when None.
    :param lse: float32 `[num_tokens, num_heads]`, contiguous; takes the natural log-sum-exp of each query's scores,
        -inf where it saw no key.
    :returns: `[num_tokens, num_heads, head_dim]`, contiguous, of query's dtype.
    :raises ValueError: on a wrong shape, dtype, stride or device, or, on CPU, on lengths that do not fit.
    """
    if kv_layer.device.type != "cpu":
        return attend_with_triton(
            query, kv_layer, block_tables, query_starts, seq_lens,
            scale=scale, kv_scales=kv_scales, window=window, max_seq_len=max_seq_len, lse=lse,
        )  # fmt: skip
    check_attention(query, kv_layer, block_tables, seq_lens, scale=scale, kv_scales=kv_scales, window=window, lse=lse)
    check_index("query_starts", query_starts, (seq_lens.size(0) + 1,), kv_layer.device)
    return attend_on_cpu(
        query, kv_layer, block_tables, query_starts, seq_lens,
        scale=scale, kv_scales=kv_scales, window=window, lse=lse,
    )  # fmt: skip


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
    max_seq_len: int | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """`paged_attention` through the Triton kernels, whose launchers check what they are given."""
    # Imported here: triton is not needed, and not everywhere to be had, where the engine runs on CPU.
    from kvtier_kernels.paged_decode import paged_decode
    from kvtier_kernels.prefix_prefill import prefix_prefill

    # As many queries as sequences, none without a query: one each.
    if query.size(0) == seq_lens.size(0):
        return paged_decode(
            query, kv_layer, block_tables, seq_lens,
            scale=scale, kv_scales=kv_scales, window=window, max_seq_len=max_seq_len, lse=lse,
        )  # fmt: skip
    return prefix_prefill(
        query, kv_layer, block_tables, query_starts, seq_lens,
        scale=scale, kv_scales=kv_scales, window=window, max_seq_len=max_seq_len, lse=lse,
    )  # fmt: skip
