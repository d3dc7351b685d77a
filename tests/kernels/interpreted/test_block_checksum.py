"""Checksums of blocks: the kernel in the interpreter, numpy on the host, and integers without end agree bit for bit."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from kvtier.device.device_check import DeviceCheck
from kvtier.errors import InvalidInputError
from kvtier_kernels import block_checksum_reference
from kvtier_kernels.checksums import SEED, host_checksum
from kvtier_kernels.copies import block_checksum as block_checksum_module
from kvtier_kernels.copies.block_checksum import block_checksum
from kvtier_kernels.copies.part_copy import Parts

NUM_BLOCKS, NUM_PARTS = 6, 3


def random_bytes(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def host_sums(blocks: Tensor, part_sizes: list[int], block_ids: list[int]) -> list[int]:
    return [host_checksum(blocks[block].flatten().numpy(), part_sizes) for block in block_ids]


@pytest.mark.parametrize("part_bytes", [64, 20_016, 24, 20, 6, 51, 1])
def test_kernel_host_and_reference_agree(part_bytes: int) -> None:
    """Words in accesses of 16 bytes and of fewer, parts that end inside a word, and one with several programs."""
    kv = random_bytes(NUM_BLOCKS, NUM_PARTS, part_bytes)
    block_ids = [4, 0, 4, 5]
    expected = host_sums(kv, [part_bytes] * NUM_PARTS, block_ids)
    for dtype in (torch.int32, torch.int64):
        assert block_checksum([Parts.of(kv.unbind(1))], torch.tensor(block_ids, dtype=dtype)).tolist() == expected
    if part_bytes < 1000:
        assert block_checksum_reference(kv.unbind(1), torch.tensor(block_ids)).tolist() == expected


def test_parts_of_several_sizes_are_one_block() -> None:
    """Rows with room between them, words numbered through."""
    sizes = [32, 32, 40, 3]
    groups = [
        random_bytes(2, NUM_BLOCKS, 48)[:, :, :32],
        random_bytes(1, NUM_BLOCKS, 40),
        random_bytes(1, NUM_BLOCKS, 3),
    ]
    parts = [Parts.of(group.unbind()) for group in groups]
    whole = torch.cat([part for group in groups for part in group], dim=1)
    assert block_checksum(parts, torch.arange(NUM_BLOCKS)).tolist() == host_sums(whole, sizes, list(range(NUM_BLOCKS)))


def test_blocks_that_do_not_exist_have_the_checksum_of_nothing() -> None:
    parts = [Parts.of(random_bytes(NUM_PARTS, NUM_BLOCKS, 16).unbind())]
    assert block_checksum(parts, torch.tensor([-1, NUM_BLOCKS])).tolist() == [SEED, SEED]
    assert block_checksum(parts, torch.tensor([], dtype=torch.int64)).tolist() == []


def test_wrong_arguments_are_refused() -> None:
    parts = Parts.of(random_bytes(NUM_PARTS, NUM_BLOCKS, 16).unbind())
    for wrong, message in (
        (lambda: block_checksum([], torch.tensor([0])), "no parts"),
        (lambda: block_checksum([parts], torch.tensor([[0]])), "block_ids .* needs shape"),
        (lambda: block_checksum([parts], torch.tensor([0.0])), "block_ids .* needs int32 or int64"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


def test_a_launch_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_checksum_module, "MOST_PIECES", NUM_PARTS)
    parts = [Parts.of(random_bytes(NUM_PARTS, NUM_BLOCKS, 16).unbind())]
    with pytest.raises(ValueError, match="6 pieces of 2 blocks: too much for a launch"):
        block_checksum(parts, torch.tensor([0, 1]))


def _flip(kv: Tensor, *_: object) -> None:
    kv[3, 1, 17] ^= 0x80


def _swap_words(kv: Tensor, *_: object) -> None:
    kv[3, 1, :8], kv[3, 1, 8:16] = kv[3, 1, 8:16].clone(), kv[3, 1, :8].clone()


def _swap_parts(kv: Tensor, *_: object) -> None:
    kv[3] = kv[3].flip(0)


def _other_block(kv: Tensor, *_: object) -> None:
    kv[3] = kv[2]


def _no_page(kv: Tensor, *_: object) -> None:
    kv[3, 2] = 0


def _negate(kv: Tensor, *_: object) -> None:
    """Every sign of 16-bit values."""
    kv[3, :, 1::2] ^= 0x80


@pytest.mark.parametrize("damage", [_flip, _swap_words, _swap_parts, _other_block, _no_page, _negate])
def test_damage_is_found(damage: Callable[[Tensor], None]) -> None:
    kv = random_bytes(NUM_BLOCKS, NUM_PARTS, 64)
    host = kv.flatten(1).numpy().copy()
    check = DeviceCheck([Parts.of(kv.unbind(1))], every=1)
    slots = device_slots = [2, 3, 5]
    assert check.wrong(host, slots, device_slots) == []
    damage(kv)
    assert check.wrong(host, slots, device_slots) == [1]


def test_blocks_are_compared_with_the_rows_that_they_came_from() -> None:
    """Rows with room behind the block, in an order of their own."""
    kv = random_bytes(NUM_BLOCKS, NUM_PARTS, 20)
    host = np.zeros((NUM_BLOCKS, 70), dtype=np.uint8)
    slots, device_slots = [5, 0, 3], [1, 2, 0]
    host[slots, :60] = kv.flatten(1).numpy()[device_slots]
    check = DeviceCheck([Parts.of(kv.unbind(1))], every=1)
    assert check.wrong(host, slots, device_slots) == []
    assert check.wrong(host, np.array(slots), np.array([1, 0, 2])) == [1, 2]
    assert check.wrong(host, [], []) == []


def test_one_block_in_so_many_is_looked_at_and_one_of_each_load(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = random_bytes(NUM_BLOCKS, NUM_PARTS, 16)
    host = 255 - kv.flatten(1).numpy()
    check = DeviceCheck([Parts.of(kv.unbind(1))], every=4)
    looked_at = [check.wrong(host, range(count), range(count)) for count in (6, 1, 1, 3, 2, 6)]
    # Blocks 0, 4 and 8, 12, 16 of all; of loads without one of these, another one.
    assert looked_at == [[0, 4], [0], [0], [0], [1], [3]]
    with pytest.raises(InvalidInputError, match="one block in 0"):
        DeviceCheck([Parts.of(kv.unbind(1))], every=0)
