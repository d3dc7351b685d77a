"""Attention over paged KV: one launcher per operation, with a plain torch reference beside it.

| module | what it is |
| --- | --- |
| `attention` | attention over block tables, the fast path on CPU |
| `write` | new keys and values into their blocks |
| `reference` | both in plain float32 torch: the oracle of every faster path |
| `arguments` | the checks that all launchers share |

KV is block-first: `[num_blocks, num_layers, 2, tokens_per_block, num_kv_heads, head_dim]`, so that one
block of all layers is one contiguous range of bytes. Launchers take one layer's view of it,
`kv[:, layer]`.
"""

from kvtier_kernels.attention import paged_attention
from kvtier_kernels.reference import kv_write_reference, paged_attention_reference
from kvtier_kernels.write import kv_write

__all__ = ["kv_write", "kv_write_reference", "paged_attention", "paged_attention_reference"]
