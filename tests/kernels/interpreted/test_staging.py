"""Staging part by part, few programs, host memory: `part_copy` and `block_copy`."""

import pytest
import torch
from torch import Tensor

from kvtier_kernels import block_copy_reference, part_copy_reference
from kvtier_kernels.arguments import check_reachable
from kvtier_kernels.copies import row_copy
from kvtier_kernels.copies.block_copy import block_copy
from kvtier_kernels.copies.copy_pieces import Pieces, cut
from kvtier_kernels.copies.copy_tiles import CopyTile
from kvtier_kernels.copies.part_copy import Parts, part_copy
from memory_rig import random_bytes, sparse

CUDA = torch.device("cuda", 0)
SMALL = CopyTile(rows=2, words=16, word_bytes=4, num_warps=4)
"""Many pieces of little memory: 2 blocks, 64 bytes of each."""


def pages(num_layers: int, part_bytes: int, seed: int = 0) -> tuple[Tensor, ...]:
    """A page per layer of 9 blocks, all layers of a block side by side."""
    return random_bytes(9, num_layers, part_bytes, seed=seed).unbind(1)


@pytest.mark.parametrize("part_bytes", [1, 50, 4096, 20_016])
@pytest.mark.parametrize("max_programs", [None, 1, 3])
def test_layers_are_gathered_one_after_the_other(part_bytes: int, max_programs: int | None) -> None:
    ours, theirs = pages(5, part_bytes), pages(5, part_bytes)
    # The last three pairs name a row, a block, and a row again that do not exist.
    rows = torch.tensor([1, 5, -1, 0, 6])
    # Rows with something between them, that must stay.
    memory, other = (random_bytes(5, 6, part_bytes + 16, seed=1) for _ in range(2))
    for gather, block_ids in ((True, torch.tensor([8, 0, 3, 9, 2])), (False, torch.tensor([2, 3, 7, -1, 8]))):
        part_copy(Parts.of(ours), block_ids, memory[:, :, :part_bytes], rows, gather=gather, max_programs=max_programs)
        part_copy_reference(theirs, block_ids[:2], other[:, :, :part_bytes], rows[:2], gather=gather)
        assert torch.equal(memory, other)
        assert all(torch.equal(mine, reference) for mine, reference in zip(ours, theirs, strict=True))


def test_staging_block_by_block_and_part_by_part_hold_the_same() -> None:
    parts, block_ids, rows = Parts.of(pages(3, 48)), torch.tensor([4, 0, 7]), torch.tensor([2, 0, 1])
    by_block, by_part = torch.zeros(3, 3 * 48, dtype=torch.uint8), torch.zeros(3, 3, 48, dtype=torch.uint8)
    part_copy(parts, block_ids, by_block, rows, gather=True)
    part_copy(parts, block_ids, by_part, rows, gather=True)
    assert torch.equal(by_block.view(3, 3, 48).transpose(0, 1), by_part)


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("max_programs", [1, 2, 5, 100])
def test_pieces_by_far_more_and_fewer_than_programs(
    max_programs: int, gather: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are 4 pieces of each of 4 parts."""
    monkeypatch.setattr(row_copy, "copy_tile", lambda *_args, host: SMALL)
    paged, staging = pages(4, 100), random_bytes(4, 3, 100, seed=2)
    block_ids, rows = torch.tensor([8, 0, 3]), torch.tensor([1, 2, 0])
    expected_pages, expected_staging = [part.clone() for part in paged], staging.clone()
    part_copy_reference(expected_pages, block_ids, expected_staging, rows, gather=gather)
    part_copy(Parts.of(paged), block_ids, staging, rows, gather=gather, max_programs=max_programs)
    assert torch.equal(staging, expected_staging)
    assert all(torch.equal(mine, reference) for mine, reference in zip(paged, expected_pages, strict=True))


@pytest.mark.parametrize("max_programs", [1, 2, 7])
def test_block_copy_with_few_programs(max_programs: int) -> None:
    blocks, staging = random_bytes(9, 40_016), random_bytes(5, 40_016, seed=1)
    block_ids, rows = torch.tensor([8, 0, 3]), torch.tensor([1, 4, 0])
    expected = staging.clone()
    block_copy_reference(blocks, block_ids, expected, rows)
    block_copy(blocks, block_ids, staging, rows, max_programs=max_programs)
    assert torch.equal(staging, expected)


def test_host_memory_must_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.zeros(4, 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"staging is on cpu, .* on cuda:0: must be equal, or pinned"):
        check_reachable("staging", memory, CUDA)
    monkeypatch.setattr(Tensor, "is_pinned", lambda _self: True)
    check_reachable("staging", memory, CUDA)
    check_reachable("staging", memory, memory.device)
    with pytest.raises(ValueError, match="staging is on meta"):
        check_reachable("staging", memory.to("meta"), CUDA)
    with pytest.raises(ValueError, match="staging is on cpu"):
        check_reachable("staging", memory, torch.device("meta"))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="there are no parts"):
        Parts.of([])
    parts, index = Parts.of(pages(3, 16)), torch.zeros(2, dtype=torch.int64)
    good = torch.zeros(3, 4, 16, dtype=torch.uint8)
    for words, staging in (
        (r"staging .* needs \[3, rows, 16\]", good[:2]),
        (r"staging .* needs \[3, rows, 16\]", good[:, :, :8]),
        (r"staging .* needs \[3, rows, 16\]", good[None]),
        ("staging .* contiguous rows", torch.zeros(3, 4, 32, dtype=torch.uint8)[:, :, ::2]),
        ("staging .* do not overlap", good[:1].expand(3, -1, -1)),
        ("staging .* do not overlap", good[:, :1].expand(-1, 4, -1)),
        ("staging .* do not overlap", good.view(-1).as_strided((3, 4, 16), (16, 16, 1))),
        ("staging .* do not overlap", good.view(-1).as_strided((3, 4, 16), (48, 16, 1))),
        ("staging .* needs uint8", good.view(torch.int8)),
        ("staging is on meta", good.to("meta")),
    ):
        with pytest.raises(ValueError, match=words):
            part_copy(parts, index, staging, index, gather=True)
    with pytest.raises(ValueError, match="max_programs is 0"):
        part_copy(parts, index, good, index, gather=True, max_programs=0)
    assert good.eq(0).all()


def test_parts_and_rows_may_lie_beyond_32_bits() -> None:
    """Parts in memory of their own, blocks of each far apart, and so are rows and parts of staging."""
    far = 3 * 2**30
    parts = [sparse(2 * far + 4096).as_strided((3, 4096), (far, 1)) for _ in range(2)]
    staging = sparse(3 * far + 4096).as_strided((2, 2, 4096), (2 * far, far, 1))
    values, block_ids, rows = random_bytes(2, 2, 4096), torch.tensor([2, 1]), torch.tensor([1, 0])
    for part, of_part in zip(parts, values, strict=True):
        part[2], part[1] = of_part
    part_copy(Parts.of(parts), block_ids, staging, rows, gather=True)
    assert torch.equal(staging.flip(1), values)
    part_copy(Parts.of(parts), block_ids.flip(0), staging, rows, gather=False)
    assert all(torch.equal(part[1:], of_part) for part, of_part in zip(parts, values, strict=True))


def test_parts_may_lie_beyond_32_bits_where_the_stride_between_them_does_not() -> None:
    stride = 2**31 - 17
    staging = sparse(3 * stride + 2 * 64).as_strided((4, 2, 61), (stride, 64, 1))
    values, index = pages(4, 61), torch.tensor([1])
    part_copy(Parts.of(values), index, staging, index, gather=True)
    assert torch.equal(staging[:, 1], torch.stack(values)[:, 1])


def test_launches_are_cut_into_pieces() -> None:
    options = {"device": torch.device("cpu"), "host": False, "max_programs": None}
    assert cut(7, 3, 64, **options) == Pieces(per_part=7, num_pieces=21, num_programs=21)  # type: ignore[arg-type]
    assert cut(7, 3, 64, **(options | {"max_programs": 4})).num_programs == 4  # type: ignore[arg-type]
    beside_host = cut(1, 3, 64, **(options | {"host": True}))  # type: ignore[arg-type]
    assert beside_host.num_programs == 2
    for per_part, part_bytes in ((2**29 + 1, 64), (1, 2**30 + 1)):
        with pytest.raises(ValueError, match="too much for a launch"):
            cut(per_part, 2, part_bytes, **options)  # type: ignore[arg-type]
