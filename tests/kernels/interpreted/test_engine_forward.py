"""The engine's forward pass with the Triton kernels, in the interpreter, against the same with the paths of CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine_rig import TOKENS_PER_BLOCK
from kvtier_engine.model import llama
from kvtier_engine.model.kv_groups import KVGroups
from kvtier_engine.model.llama import Chunk
from kvtier_engine.model.paged_kv import PagedKV, allocate_kv
from kvtier_engine.scheduling.request import NO_BLOCK
from kvtier_kernels import SharedPrefixes
from kvtier_kernels.attention import layer_attention, paged_decode
from tiny_model import CONFIG, VOCABULARY, WINDOWED_CONFIG, WINDOWED_MODEL, tiny_model

WINDOW = WINDOWED_CONFIG.sliding_window or 0
TOLERANCE = 1e-3
"""On logits of up to 20, as between batches on CPU (`test_engine_model.py`); a wrong key moves them 20 times as far."""


@contextmanager
def triton_kernels() -> Iterator[None]:
    """What the launchers do for CUDA tensors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama, "step_attention", layer_attention.step_with_triton)
        yield


@contextmanager
def shared_prefixes_always() -> Iterator[list[SharedPrefixes]]:
    """As `triton_kernels`, and what sequences share is read once, however little it is. Yields what they shared."""
    found: list[SharedPrefixes] = []

    def find(block_tables: Tensor, seq_lens: Tensor, kv_layer: Tensor, _num_heads: int) -> SharedPrefixes:
        found.append(SharedPrefixes.of(block_tables, seq_lens, kv_layer.size(2)))
        return found[-1]

    with triton_kernels(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama, "find_shared_prefixes", find)
        patch.setattr(paged_decode, "plan_decode", None)
        yield found


def fresh_kv(num_blocks: int = 24) -> PagedKV:
    kv = allocate_kv(CONFIG, num_blocks, TOKENS_PER_BLOCK, torch.float32)
    kv.tensor.fill_(float("nan"))
    return kv


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def steps() -> list[list[Chunk]]:
    """Three sequences: prefills that end in, at and after a block's end, two of them over a cached prefix; decodes."""
    first, second, third = tokens(31, 1), tokens(12, 2), tokens(18, 3)
    tables = [7, 2, 19, 0, 11, 5, 23, 1], [3, 9, 14], [4, 22, 8, 16, 10]
    return [
        [Chunk(first[:17], 0, tables[0]), Chunk(second[:4], 0, tables[1])],
        [Chunk(first[17:29], 17, tables[0]), Chunk(second[4:9], 4, tables[1]), Chunk(third[:16], 0, tables[2])],
        [Chunk(first[29:30], 29, tables[0]), Chunk(second[9:11], 9, tables[1]), Chunk(third[16:17], 16, tables[2])],
        [Chunk(first[30:], 30, tables[0]), Chunk(second[11:], 11, tables[1]), Chunk(third[17:], 17, tables[2])],
    ]


def run(kv: PagedKV) -> list[Tensor]:
    model = tiny_model()
    return [model.forward(chunks, kv) for chunks in steps()]


def in_groups(chunk: Chunk) -> Chunk:
    """With blocks of their own for windowed layers, and none for what their window has left."""
    left = max(0, chunk.start - WINDOW + 1) // TOKENS_PER_BLOCK
    tables = [[NO_BLOCK] * left + [24 * group + block for block in chunk.block_table[left:]] for group in (1, 2)]
    return replace(chunk, windowed_tables=tables)


def test_windowed_layers_read_no_block_that_their_window_has_left() -> None:
    kv = allocate_kv(WINDOWED_CONFIG, 72, TOKENS_PER_BLOCK, torch.float32, groups=KVGroups.of(WINDOWED_CONFIG))
    expected_kv = allocate_kv(WINDOWED_CONFIG, 24, TOKENS_PER_BLOCK, torch.float32)
    for each in (kv, expected_kv):
        each.tensor.fill_(float("nan"))
    expected = [WINDOWED_MODEL.forward(chunks, expected_kv) for chunks in steps()]
    with triton_kernels():
        logits = [WINDOWED_MODEL.forward(list(map(in_groups, chunks)), kv) for chunks in steps()]
    for ours, theirs in zip(logits, expected, strict=True):
        assert (ours - theirs).abs().max().item() < TOLERANCE


def test_logits_and_kv_are_those_of_the_cpu_path() -> None:
    """Prefill, prefill over a cached prefix, mixed batches and decodes of several sequences."""
    kv, expected_kv = fresh_kv(), fresh_kv()
    expected = run(expected_kv)
    with triton_kernels():
        logits = run(kv)
    for ours, theirs in zip(logits, expected, strict=True):
        assert theirs.abs().max().item() < 20
        assert (ours - theirs).abs().max().item() < TOLERANCE
        assert torch.equal(ours.argmax(dim=-1), theirs.argmax(dim=-1))
    written = ~expected_kv.tensor.isnan()
    assert torch.equal(~kv.tensor.isnan(), written)
    assert (kv.tensor - expected_kv.tensor)[written].abs().max().item() < TOLERANCE


def test_the_tolerance_notices_a_key_too_few() -> None:
    kv = fresh_kv()
    *before, last = steps()
    model = tiny_model()
    for chunks in before:
        model.forward(chunks, kv)
    with triton_kernels():
        right = model.forward(last, kv)
    kv.tensor[7, :, 0, 2] = 0.0
    with triton_kernels():
        wrong = model.forward(last, kv)
    assert (right - wrong)[0].abs().max().item() > 20 * TOLERANCE


def test_a_sequence_alone_and_beside_others_gets_the_same_logits() -> None:
    model = tiny_model()
    chunks = steps()[0]
    with triton_kernels():
        together = model.forward(chunks, fresh_kv())
        for row, chunk in enumerate(chunks):
            alone = model.forward([chunk], fresh_kv())
            assert (together[row] - alone[0]).abs().max().item() < TOLERANCE


def test_blocks_may_lie_anywhere() -> None:
    """Bit for bit the same, whichever blocks hold it."""
    model = tiny_model()
    ids = tokens(22, 5)
    results = []
    with triton_kernels():
        for table in ([0, 1, 2, 3, 4, 5], [17, 3, 21, 9, 0, 12]):
            kv = fresh_kv()
            prefill = model.forward([Chunk(ids[:21], 0, table)], kv)
            results.append((prefill, model.forward([Chunk(ids[21:], 21, table)], kv)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_decodes_over_shared_blocks_give_the_logits_of_the_cpu_path() -> None:
    """Three of four share 3 blocks. Prefills are computed as ever; so is what the engine shares by itself."""
    model, kv = tiny_model(), fresh_kv()
    shared, first, second, third, alone = (tokens(count, seed) for seed, count in enumerate((12, 3, 6, 1, 7)))
    tables = [5, 2, 19, 0], [5, 2, 19, 7, 3], [5, 2, 19, 11], [4, 22]
    model.forward([Chunk(shared + first[:-1], 0, tables[0]), Chunk(alone[:-1], 0, tables[3])], kv)
    model.forward([Chunk(second[:-1], 12, tables[1])], kv)
    starts = [14, 17, 12, 6]
    chunks = [
        Chunk([ids[-1]], start, table)
        for ids, start, table in zip((first, second, third, alone), starts, tables, strict=True)
    ]
    expected = model.forward(chunks, kv)
    with shared_prefixes_always() as found:
        logits = model.forward(chunks, kv)
    (prefixes,) = found
    assert prefixes.num_saved_keys == 2 * 12
    assert (logits - expected).abs().max().item() < TOLERANCE
    assert torch.equal(logits.argmax(dim=-1), expected.argmax(dim=-1))
