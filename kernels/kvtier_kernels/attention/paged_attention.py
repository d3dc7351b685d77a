"""Attention over paged KV where queries are shorter than keys: one launcher for CPU and CUDA."""

from typing import Protocol

from torch import Tensor

from kvtier_kernels.attention.attention_batch import AttentionBatch
from kvtier_kernels.attention.attention_cpu import plan_on_cpu
from kvtier_kernels.attention.shared_prefixes import SharedPrefixes
from kvtier_kernels.tiles import worth_sharing


def paged_attention(
    query: Tensor,
    kv_layer: Tensor,
    batch: AttentionBatch,
    kv_scales: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Causal attention of each sequence's newest tokens over all its keys, the new ones included.

    The keys and values of the new tokens must be in their blocks already (`kv_write`). What lies in
    the blocks beyond `seq_lens` never counts, whatever it is. The result depends on the values only, not on
    which physical blocks hold them: bit for bit the same for the same lengths, hints
    and `prefixes` of the batch.

    Tensors on CPU go through torch's fused attention, tensors on CUDA through the Triton kernels: `paged_decode`
    when every sequence has one query (`shared_prefix_decode` where the batch has `prefixes`), `prefix_prefill`
    otherwise, and always where the batch is invariant. Which it is follows from the shapes, so that nothing waits for
    the device. For the same reason values on a CUDA device are not checked: block ids there must exist.

    :param batch: it and its `check` describe all arguments.
    :returns: `[num_tokens, num_heads, head_dim]`, contiguous, of query's dtype.
    :raises ValueError: on a wrong shape, dtype, stride or device, or, on CPU, on lengths that do not fit.
    """
    if kv_layer.device.type != "cpu":
        return attend_with_triton(query, kv_layer, batch, kv_scales, lse)
    batch.check(query, kv_layer, kv_scales, lse)
    return plan_on_cpu(query, kv_layer, batch).run(query, kv_layer, kv_scales, lse)


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
    batch: AttentionBatch,
    kv_scales: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """`paged_attention` through the Triton kernels, whose launchers check what they are given."""
    return plan_with_triton(query, kv_layer, batch, kv_scales, lse).run(query, kv_layer, kv_scales, lse)


def plan_with_triton(
    query: Tensor,
    kv_layer: Tensor,
    batch: AttentionBatch,
    kv_scales: Tensor | None = None,
    lse: Tensor | None = None,
) -> AttentionPlan:
    """Checks the arguments of `paged_attention` and chooses the Triton kernels that compute it.

    :raises ValueError: on a wrong shape, dtype, stride or device.
    """
    # Imported here: triton is not needed, and not everywhere to be had, where the engine runs on CPU.
    from kvtier_kernels.attention.paged_decode import plan_decode
    from kvtier_kernels.attention.prefix_prefill import plan_prefill
    from kvtier_kernels.attention.shared_prefix_decode import plan_shared_decode

    if batch.invariant:
        return plan_prefill(query, kv_layer, batch.with_starts(), kv_scales, lse)
    if batch.prefixes is not None and batch.window is None and batch.scoring.alibi_slopes is None:
        return plan_shared_decode(query, kv_layer, batch, kv_scales, lse)
    # As many queries as sequences, none without a query: one each.
    if query.size(0) == batch.seq_lens.size(0):
        return plan_decode(query, kv_layer, batch, kv_scales, lse)
    return plan_prefill(query, kv_layer, batch, kv_scales, lse)


def find_shared_prefixes(
    block_tables: Tensor, seq_lens: Tensor, kv_layer: Tensor, num_heads: int, *, replayed: bool = False
) -> SharedPrefixes | None:
    """The `prefixes` of an `AttentionBatch` whose sequences have one query each, for all layers.

    Takes time on the host in proportion to the size of `block_tables`, where the sequences are so long that it may be
    worth while: once per step, not per layer.

    :param block_tables: as the batch has them, but on CPU; `seq_lens` likewise.
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
