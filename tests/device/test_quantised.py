"""Blocks that go down in the form of a lossy codec and come back."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvtier.device.kv import Blocks
from kvtier.device.quantised import QuantisedHostKV
from kvtier.errors import InvalidInputError
from kvtier.memory.arena import Arena
from kvtier_kernels.quantise_reference import dequantise_reference, quantise_reference
from kvtier_kernels.records import LossyCodec, RecordLayout

NUM_BLOCKS = 40


def layout_of(codec: LossyCodec, dtype: torch.dtype = torch.bfloat16) -> RecordLayout:
    """Values and scales both end in the middle of 16 bytes."""
    return RecordLayout(codec, dtype, head_dim=10, num_vectors=5)


def blocks_of(layout: RecordLayout) -> torch.Tensor:
    """`[NUM_BLOCKS, num_vectors, head_dim]`, vectors of all magnitudes, some of them zero."""
    shape = (NUM_BLOCKS, layout.num_vectors, layout.head_dim)
    values = (
        torch.randn(shape, generator=torch.Generator().manual_seed(1))
        * torch.logspace(-4, 3, NUM_BLOCKS)[:, None, None]
    )
    values[::3, 1] = 0.0
    return values.to(layout.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", list(LossyCodec))
def test_blocks_come_back_as_the_codec_says(codec: LossyCodec, dtype: torch.dtype) -> None:
    """More of them than are quantised at a time."""
    layout = layout_of(codec, dtype)
    values = blocks_of(layout)
    rows = values.clone().view(NUM_BLOCKS, -1).view(torch.uint8)
    kv, arena = QuantisedHostKV(rows, layout), Arena(50, layout.record_bytes + 8)
    arena.rows[:] = 0xA5
    taken, slots = list(range(39, 2, -1)), list(range(5, 42))
    kv.gather(taken, arena, slots, after=None)
    others = [slot for slot in range(50) if slot not in slots]
    assert (arena.rows[others] == 0xA5).all()
    assert (arena.rows[:, layout.record_bytes :] == 0xA5).all()
    stored, scales = quantise_reference(values, codec.stored_dtype)
    for slot, block in zip(slots, taken, strict=True):
        record = arena.rows[slot, : layout.record_bytes]
        assert np.array_equal(record[:50], stored[block].view(torch.uint8).flatten().numpy())
        assert np.array_equal(record[64:84].view(np.float32), scales[block].numpy())
        assert not record[50:64].any()
        assert not record[84:].any()
    rows.fill_(0x5A)
    back = [taken[place] for place in range(0, 37, 2)]
    kv.scatter(arena, slots[::2], back, after=None)
    expected = torch.full_like(rows, 0x5A)
    expected[back] = dequantise_reference(stored, scales, dtype).view(NUM_BLOCKS, -1).view(torch.uint8)[back]
    assert torch.equal(rows, expected)


@pytest.mark.filterwarnings("error")
def test_records_in_memory_that_is_read_only() -> None:
    layout = layout_of(LossyCodec.INT8)
    rows = blocks_of(layout).view(NUM_BLOCKS, -1).view(torch.uint8)
    expected, arena = rows.clone(), Arena(NUM_BLOCKS, layout.record_bytes)
    kv = QuantisedHostKV(rows, layout)
    slots = list(range(NUM_BLOCKS))
    kv.gather(slots, arena, slots, after=None)
    kv.scatter(arena, slots, slots, after=None)
    expected.copy_(rows)
    rows.zero_()
    seen = arena.rows.view()
    seen.flags.writeable = False
    leased = SimpleNamespace(num_slots=NUM_BLOCKS, slot_bytes=layout.record_bytes, rows=seen)
    kv.scatter_all([Blocks(leased, slots[:20], slots[:20]), Blocks(leased, slots[20:], slots[20:])], after=None)
    assert torch.equal(rows, expected)


def test_what_does_not_fit_is_refused() -> None:
    layout = layout_of(LossyCodec.INT8)
    rows = torch.zeros(4, layout.page_bytes, dtype=torch.uint8)
    for wrong in (rows[0], rows.char(), rows[:, :-2], rows.t().contiguous().t()):
        with pytest.raises(InvalidInputError, match=r"need a uint8 view of \[num_blocks, 100\]"):
            QuantisedHostKV(wrong, layout)
    kv, arena = QuantisedHostKV(rows, layout), Arena(3, layout.record_bytes)
    for device_slots, arena_slots in (([4], [0]), ([-1], [0]), ([0], [3]), ([0], [-1]), ([0, 1], [0])):
        with pytest.raises(InvalidInputError, match="slots"):
            kv.gather(device_slots, arena, arena_slots, after=None)
        with pytest.raises(InvalidInputError, match="slots"):
            kv.scatter(arena, arena_slots, device_slots, after=None)
    with pytest.raises(InvalidInputError, match="blocks of 96 bytes in slots of 95"):
        kv.gather([0], Arena(3, 95), [0], after=None)
    kv.gather([], arena, [], after=None)
    kv.scatter(arena, [], [], after=None)
