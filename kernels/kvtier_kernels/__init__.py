"""Attention over paged KV and the copies around it, each operation beside a plain torch reference.

| module | what it is |
| --- | --- |
| `attention`, `write` | what an engine calls; CPU tensors take torch's fused paths, CUDA tensors the Triton kernels |
| `layer_attention` | both for all layers of a step: checked in the first one, launched in the others |
| `attention_batch` | what attention is told of a batch, described and checked |
| `attention_cpu` | the fast path of attention on CPU |
| `attention_cpu_tiles`, `attention_cpu_trial` | the same with bits that depend on a query alone; a trial of it |
| `prefix_prefill`, `paged_decode`, `shared_prefix_decode` | attention as Triton kernels with their launchers |
| `scoring` | soft caps, slopes by distance, sinks: what some models do to scores |
| `merge_states`, `slot_write` | the other Triton kernels with their launchers |
| `paged_softmax` | the loops over keys that the attention kernels share |
| `shared_prefixes` | which sequences of a batch share leading blocks |
| `invariant.linear`, `invariant.rms_norm` | products and norms of a model, with bits that depend on a token alone |
| `block_copy`, `part_copy` | copies between paged KV and staging: whole blocks, or parts of blocks, layer by layer |
| `row_copy`, `copy_pieces` | the kernel of these copies, and what all copies share |
| `quantised_copy` | the same in the form of a lossy codec (`records`) |
| `block_checksum`, `xxh3` | xxh3_64 of blocks on the device, as their writers compute it, and the constants of XXH3 |
| `reference` | every operation in plain torch: the oracle of all faster paths |
| `quantise_reference` | quantised KV and lossy codecs in plain torch, likewise |
| `quantising` | what the kernels that quantise share |
| `arguments`, `launching` | the checks that launchers share |
| `tiles`, `copy_tiles` | how much of the work one Triton program takes |
| `selfcheck` | every Triton kernel against the reference on the GPU at hand: `python -m kvtier_kernels.selfcheck` |

KV is block-first: `[num_blocks, num_layers, 2, tokens_per_block, num_kv_heads, head_dim]`, so that one
block of all layers is one contiguous range of bytes. Launchers of attention and `kv_write` take one layer's view of
it, `kv[:, layer]`; `block_copy` takes it as rows, `kv.view(num_blocks, -1)`. Copies of parts are for layers that are
wanted one by one, and for the KV of other engines, whose blocks lie in a page per layer.

The modules with Triton kernels are not imported here: triton is not everywhere to be had, and not needed on CPU. Beside
torch and triton, the reference of `block_checksum` alone needs `xxhash`, which is a dependency of kvtier's core.
"""

from kvtier_kernels.attention.attention_batch import AttentionBatch
from kvtier_kernels.attention.layer_attention import LayerAttention, decode_attention, step_attention
from kvtier_kernels.attention.paged_attention import find_shared_prefixes, paged_attention
from kvtier_kernels.attention.shared_prefixes import SharedPrefixes
from kvtier_kernels.reference import (
    block_checksum_reference,
    block_copy_reference,
    kv_write_reference,
    merge_states_reference,
    paged_attention_reference,
    part_copy_reference,
)
from kvtier_kernels.scoring import Scoring
from kvtier_kernels.writes.kv_write import kv_write

__all__ = [
    "AttentionBatch",
    "LayerAttention",
    "Scoring",
    "SharedPrefixes",
    "block_checksum_reference",
    "block_copy_reference",
    "decode_attention",
    "find_shared_prefixes",
    "kv_write",
    "kv_write_reference",
    "merge_states_reference",
    "paged_attention",
    "paged_attention_reference",
    "part_copy_reference",
    "step_attention",
]
