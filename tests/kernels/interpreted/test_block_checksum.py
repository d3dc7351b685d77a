"""Checksums of blocks: the kernels in the interpreter and xxHash itself agree, and damage is found."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor

from kvtier.device import device_check
from kvtier.device.device_check import DeviceCheck
from kvtier.errors import InvalidInputError
from kvtier_kernels import block_checksum_reference
from kvtier_kernels.copies import block_checksum as block_checksum_module
from kvtier_kernels.copies.block_checksum import block_checksum
from kvtier_kernels.copies.part_copy import Parts

NUM_BLOCKS, NUM_PARTS = 6, 3


def random_bytes(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def random_prefixes(count: int, words: int) -> Tensor:
    return random_bytes(count * words * 8, seed=1).view(torch.int64).view(count, words)


def no_prefixes(count: int) -> Tensor:
    return torch.empty((count, 0), dtype=torch.int64)


@pytest.mark.parametrize(
    ("num_parts", "part_bytes", "prefix_words"),
    [
        (1, 248, 0),  # the shortest
        (1, 8, 30),  # most of it prefix, and of the last 64 bytes
        (1, 1024, 0),  # the last stripe of all is the last of a KiB
        (1, 1024, 1),  # and the first of the next one
        (5, 1024, 120),  # in which there are more
        (2, 4096, 128),
        (7, 8, 400),
        (40, 24, 11),  # many parts in a program
        (3, 10_008, 11),  # parts that end inside a program, and programs inside a part
        (1, 70 * 1024, 11),  # the chain in several rounds, and a rest
    ],
)
def test_the_device_computes_xxh3(num_parts: int, part_bytes: int, prefix_words: int) -> None:
    kv, block_ids = random_bytes(NUM_BLOCKS, num_parts, part_bytes), [4, 0, 4, 5, 1]
    prefixes = random_prefixes(5, prefix_words)
    expected = [
        xxhash.xxh3_64_intdigest(prefix.numpy().tobytes() + kv[block].numpy().tobytes())
        for prefix, block in zip(prefixes, block_ids, strict=True)
    ]
    for dtype in (torch.int32, torch.int64) if part_bytes == 24 else (torch.int64,):
        found = block_checksum([Parts.of(kv.unbind(1))], torch.tensor(block_ids, dtype=dtype), prefixes)
        assert [of % 2**64 for of in found.tolist()] == expected
    reference = block_checksum_reference(kv.unbind(1), torch.tensor(block_ids), prefixes)
    assert [of % 2**64 for of in reference.tolist()] == expected


@pytest.mark.parametrize("sizes", [[(2, 104), (3, 1600), (1, 8), (2, 4096)], [(1, 8), (1, 8), (40, 16), (1, 5000)]])
def test_parts_of_several_sizes_are_one_block(sizes: list[tuple[int, int]]) -> None:
    """Rows with room between them, and several groups of parts in one KiB."""
    groups = [random_bytes(count, NUM_BLOCKS, size + 8)[:, :, :size] for count, size in sizes]
    block_ids, prefixes = torch.tensor([3, 0, 5]), random_prefixes(3, 11)
    found = block_checksum([Parts.of(group.unbind()) for group in groups], block_ids, prefixes)
    assert torch.equal(found, block_checksum_reference([one for of in groups for one in of], block_ids, prefixes))


def test_blocks_that_do_not_exist_have_the_checksum_0() -> None:
    parts = [Parts.of(random_bytes(NUM_PARTS, blocks, 256).unbind()) for blocks in (NUM_BLOCKS, NUM_BLOCKS - 1)]
    assert block_checksum(parts[:1], torch.tensor([-1, NUM_BLOCKS]), no_prefixes(2)).tolist() == [0, 0]
    assert block_checksum(parts, torch.tensor([NUM_BLOCKS - 1]), no_prefixes(1)).tolist() == [0], "not in all parts"
    assert block_checksum(parts, torch.tensor([], dtype=torch.int64), no_prefixes(0)).tolist() == []


def test_wrong_arguments_are_refused() -> None:
    parts, ids, none = Parts.of(random_bytes(NUM_PARTS, NUM_BLOCKS, 256).unbind()), torch.tensor([0]), no_prefixes(1)
    odd, short = (Parts.of([random_bytes(NUM_BLOCKS, size)]) for size in (252, 240))
    apart = Parts.of([random_bytes(NUM_BLOCKS, 260)[:, :256]])
    for wrong, message in (
        (lambda: block_checksum([], ids, none), "no parts"),
        (lambda: block_checksum([parts], torch.tensor([[0]]), none), "block_ids .* needs shape"),
        (lambda: block_checksum([parts], torch.tensor([0.0]), none), "block_ids .* needs int32 or int64"),
        (lambda: block_checksum([parts], ids, no_prefixes(2)), "prefixes .* needs shape"),
        (lambda: block_checksum([parts], ids, none.int()), "prefixes are torch.int32: needs int64"),
        (lambda: block_checksum([parts, odd], ids, none), "part of 252 bytes: needs .* multiples of 8"),
        (lambda: block_checksum([parts, apart], ids, none), "part of 256 bytes: needs .* strides .* multiples of 8"),
        (lambda: block_checksum([short], ids, none), "are 240 bytes: need 241 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


def test_a_launch_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_checksum_module, "MOST_PIECES", 96)
    parts = [Parts.of(random_bytes(NUM_PARTS, NUM_BLOCKS, 256).unbind())]
    ids = torch.zeros(97, dtype=torch.int64)
    with pytest.raises(ValueError, match="97 pieces of 97 blocks of 96 words: too much for a launch"):
        block_checksum(parts, ids, no_prefixes(97))


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
def test_damage_is_found(damage: Callable[[Tensor], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "_BYTES_AT_A_TIME", 2 * NUM_PARTS * 64)
    kv = random_bytes(NUM_BLOCKS, NUM_PARTS, 64)
    host = kv.flatten(1).numpy().copy()
    check = DeviceCheck([Parts.of(kv.unbind(1))], every=1)
    slots = device_slots = [2, 3, 5]
    prefixes = [bytes([place] * 88) for place in slots]
    checksums = [xxhash.xxh3_64_intdigest(prefixes[place] + host[slot].tobytes()) for place, slot in enumerate(slots)]
    assert check.wrong(host, slots, device_slots) == check.mismatches(device_slots, prefixes, checksums) == []
    damage(kv)
    assert check.wrong(host, slots, device_slots) == check.mismatches(device_slots, prefixes, checksums) == [1]


def test_blocks_are_compared_with_the_rows_that_they_came_from() -> None:
    """Rows with room behind the block, in an order of their own."""
    kv = random_bytes(NUM_BLOCKS, NUM_PARTS, 24)
    host = np.zeros((NUM_BLOCKS, 80), dtype=np.uint8)
    slots, device_slots = [5, 0, 3], [1, 2, 0]
    host[slots, :72] = kv.flatten(1).numpy()[device_slots]
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


def test_what_cannot_be_checked_on_the_device_is_refused() -> None:
    odd, short = ([Parts.of([random_bytes(NUM_BLOCKS, size)])] for size in (20, 152))
    assert not DeviceCheck.can_check(odd, prefix_bytes=248)
    with pytest.raises(InvalidInputError, match=r"parts of \[20\] bytes: .* verify on the \"host\""):
        DeviceCheck(odd)
    check = DeviceCheck(short)
    assert not DeviceCheck.can_check(short, prefix_bytes=88)
    assert DeviceCheck.can_check(short, prefix_bytes=96)
    assert check.mismatches([], [], []) == []
    for prefixes in ([bytes(88)] * 2, [bytes(92)] * 2, [bytes(96), bytes(104)]):
        with pytest.raises(InvalidInputError, match=r"prefixes of .* before blocks of 152: need the same"):
            check.mismatches([0, 1], prefixes, [0, 0])
    with pytest.raises(InvalidInputError, match="2 device slots, 1 prefixes and 2 checksums"):
        check.mismatches([0, 1], [bytes(96)], [0, 0])
