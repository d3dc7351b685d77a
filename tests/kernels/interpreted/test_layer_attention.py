"""What a step checks in its first layer and only launches in the others, in the interpreter."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvtier_kernels.attention.attention_batch import AttentionBatch
from kvtier_kernels.attention.layer_attention import LayerAttention, step_with_triton
from kvtier_kernels.reference import kv_write_reference, paged_attention_reference

HEADS, KV_HEADS, HEAD_DIM, TOKENS_PER_BLOCK = 4, 2, 8, 4
SEQ_LENS = torch.tensor([7, 2, 10])
TABLES = torch.tensor([[3, 1, 0], [6, 0, 0], [5, 2, 7]])
"""Block tables of a pool of 8 blocks."""


def layer_tensors(seed: int, num_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One layer's KV, and query, key and value as a forward pass has them: views of wider rows."""
    generator = torch.Generator().manual_seed(seed)
    kv_layer = torch.randn((8, 2, TOKENS_PER_BLOCK, KV_HEADS, HEAD_DIM), generator=generator)
    rows = torch.randn((num_tokens, HEADS + 2 * KV_HEADS, HEAD_DIM), generator=generator)
    return kv_layer, rows[:, :HEADS], rows[:, HEADS : HEADS + KV_HEADS], rows[:, HEADS + KV_HEADS :]


def step_of(num_queries: list[int]) -> tuple[LayerAttention, tuple[Tensor, Tensor], AttentionBatch]:
    """A step with so many new tokens of each sequence; the places of these; and the batch."""
    positions = [
        (seq, key)
        for seq, count in enumerate(num_queries)
        for key in range(int(SEQ_LENS[seq]) - count, int(SEQ_LENS[seq]))
    ]
    block_ids = torch.tensor([int(TABLES[seq, key // TOKENS_PER_BLOCK]) for seq, key in positions])
    places = block_ids, torch.tensor([key % TOKENS_PER_BLOCK for _, key in positions])
    batch = AttentionBatch(TABLES, torch.tensor([0, *num_queries]).cumsum(0), SEQ_LENS, scale=0.3)
    return step_with_triton(places, batch), places, batch


@pytest.mark.parametrize("num_queries", [[1, 1, 1], [2, 1, 4]], ids=["decode", "prefill"])
def test_every_layer_gets_its_own_attention(num_queries: list[int]) -> None:
    attend, places, batch = step_of(num_queries)
    for seed in range(3):
        kv_layer, query, key, value = layer_tensors(seed, sum(num_queries))
        expected_kv = kv_layer.clone()
        kv_write_reference(expected_kv, key, value, *places)
        expected = paged_attention_reference(query, expected_kv, batch)
        assert (attend(kv_layer, query, key, value) - expected).abs().max().item() < 1e-5
        assert torch.equal(kv_layer, expected_kv)


@pytest.mark.parametrize(
    "change",
    [
        lambda kv_layer, query, key, value: (kv_layer[:, :, :2], query, key, value),
        lambda kv_layer, query, key, value: (kv_layer.bfloat16(), query, key, value),
        lambda kv_layer, query, key, value: (kv_layer, query[:2], key, value),
        lambda kv_layer, query, key, value: (kv_layer, query.contiguous(), key, value),
        lambda kv_layer, query, key, value: (kv_layer, query, key[:, :1], value),
        lambda kv_layer, query, key, value: (kv_layer, query, key, value.to("meta")),
    ],
    ids=["shape of KV", "dtype", "number of queries", "stride", "heads", "device"],
)
def test_a_layer_of_another_form_is_refused(change: Callable[..., tuple[Tensor, ...]]) -> None:
    attend, _, _ = step_of([1, 1, 1])
    attend(*layer_tensors(0, 3))
    kv_layer, query, key, value = layer_tensors(1, 3)
    before = kv_layer.clone()
    with pytest.raises(ValueError, match=r"in the first layer .*: must be equal"):
        attend(*change(kv_layer, query, key, value))
    assert torch.equal(kv_layer, before), "nothing is written"
    attend(kv_layer, query, key, value)


def test_the_first_layer_is_checked_in_full() -> None:
    kv_layer, query, key, value = layer_tensors(0, 3)
    before = kv_layer.clone()
    attend, _, _ = step_of([1, 1, 1])
    with pytest.raises(ValueError, match=r"key is .*, value .*: must be equal"):
        attend(kv_layer, query, key, value[:, :1])
    with pytest.raises(ValueError, match="query heads are not a multiple"):
        attend(kv_layer, query[:, :3], key, value)
    with pytest.raises(ValueError, match="quantised KV takes paged_attention"):
        attend(kv_layer.to(torch.int8), query, key, value)
    assert torch.equal(kv_layer, before), "nothing is written"
    attend(kv_layer, query, key, value)
