"""What launchers do without a GPU: refuse tensors that a kernel cannot take, or do without Triton."""

import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from kvtier_kernels.attention import merge_states as merge_states_module
from kvtier_kernels.attention import paged_decode as paged_decode_module
from kvtier_kernels.attention import prefix_prefill as prefix_prefill_module
from kvtier_kernels.attention.attention_batch import AttentionBatch
from kvtier_kernels.copies import block_copy as block_copy_module
from kvtier_kernels.writes import slot_write as slot_write_module


def test_cpu_tensors_are_refused_without_the_interpreter() -> None:
    query, kv_layer, index = torch.zeros(5, 8, 64), torch.zeros(4, 2, 16, 8, 64), torch.zeros(5, dtype=torch.int64)
    rows, batch = query, AttentionBatch(index[:, None], torch.zeros(6, dtype=torch.int64), index, scale=0.1)
    for launch in (
        lambda: prefix_prefill_module.prefix_prefill(query, kv_layer, batch),
        lambda: paged_decode_module.paged_decode(query, kv_layer, batch),
        lambda: merge_states_module.merge_states(query[:, None], rows[..., 0], query),
        lambda: slot_write_module.write_slots(kv_layer, rows, rows, index, index),
        lambda: block_copy_module.block_copy(torch.zeros(9, 4), index, torch.zeros(9, 4), index),
    ):
        with pytest.raises(ValueError, match=r"is on cpu: Triton kernels run on CUDA, or .* TRITON_INTERPRET=1"):
            launch()


def test_cpu_needs_no_triton() -> None:
    program = """
import sys
sys.modules["triton"] = None
import torch, kvtier_kernels, kvtier_kernels.tiles
kv = torch.zeros(4, 2, 8, 2, 16)
rows, index = torch.ones(3, 2, 16), torch.arange(3)
kvtier_kernels.kv_write(kv, rows, rows, index * 0, index)
tables, starts, lens = torch.zeros(1, 1, dtype=torch.int64), torch.tensor([0, 3]), torch.tensor([3])
batch = kvtier_kernels.AttentionBatch(tables, starts, lens, scale=1.0)
assert kvtier_kernels.paged_attention(rows, kv, batch).allclose(rows)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
