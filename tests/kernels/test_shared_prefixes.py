"""Which sequences share leading blocks: groups that save most, whatever lies beyond a sequence's own blocks."""

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest
import torch

from kvtier_kernels import find_shared_prefixes
from kvtier_kernels.attention.shared_prefixes import SharedPrefixes

TOKENS_PER_BLOCK = 4


def find(tables: Sequence[Sequence[int]], lens: Sequence[int], *, beyond: int = 0) -> SharedPrefixes:
    """`beyond` is what lies in the tensor after a sequence's blocks."""
    width = max(map(len, tables))
    padded = torch.full((len(tables), width + 1), beyond, dtype=torch.int32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
    return SharedPrefixes.of(padded, torch.tensor(lens), TOKENS_PER_BLOCK)


def groups_of(prefixes: SharedPrefixes) -> list[tuple[list[int], int]]:
    """Sequences and shared keys of each group."""
    starts, members = prefixes.group_starts.tolist(), prefixes.members.tolist()
    groups = [members[start:stop] for start, stop in itertools.pairwise(starts)]
    return list(zip(groups, prefixes.group_keys.tolist(), strict=True))


def test_a_common_system_prompt() -> None:
    found = find([[7, 3, 1], [9, 9], [7, 3, 2], [7, 3, 5, 6]], [11, 8, 10, 13])
    assert groups_of(found) == [([0, 2, 3], 8), ([1], 0)]
    assert found.own_starts.tolist() == [8, 0, 8, 8]
    assert (found.num_seqs, found.num_groups, found.num_saved_keys) == (4, 2, 16)
    assert (found.group_sizes, found.shared_keys) == ((3,), (8,))
    assert (found.num_own_keys, found.max_own_keys) == (3 + 8 + 2 + 5, 8)


@pytest.mark.parametrize("beyond", [0, -1, 7, 3])
def test_only_full_blocks_of_the_sequences_themselves_count(beyond: int) -> None:
    """The same blocks, but the last one is still being filled; and sequences of two blocks with equal padding."""
    found = find([[7, 3], [7, 3], [7], [2], [2]], [7, 7, 4, 3, 2], beyond=beyond)
    assert groups_of(found) == [([0, 1, 2], 4), ([3, 4], 0)]


def test_nothing_shared_is_one_group_without_keys() -> None:
    found = find([[1, 2], [2, 1], [3, 1]], [8, 8, 8])
    assert groups_of(found) == [([0, 1, 2], 0)]
    assert (found.num_saved_keys, found.shared_keys, found.max_own_keys) == (0, (), 8)
    none = SharedPrefixes.of(torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), 4)
    assert (groups_of(none), none.num_seqs, none.max_own_keys) == ([], 0, 0)


@pytest.mark.parametrize(
    ("document_blocks", "groups"),
    [(2, [([0, 1, 2, 3, 4, 5, 6], 20)]), (9, [([0, 1], 56), ([2, 3], 56), ([4, 5, 6], 20)])],
    ids=["short", "long"],
)
def test_of_nested_prefixes_the_one_that_saves_more(document_blocks: int, groups: list[tuple[list[int], int]]) -> None:
    """Seven share a prompt of 5 blocks, two and two of them a document after it."""
    prompt = list(range(5))
    documents = [50, 50, 150, 150, 250, 350, 450]
    tables = [prompt + list(range(document, document + document_blocks)) for document in documents]
    found = find(tables, [4 * len(table) for table in tables])
    assert groups_of(found) == groups


def partitions(seqs: Sequence[int]) -> Iterator[list[list[int]]]:
    if not seqs:
        yield []
        return
    for rest in partitions(seqs[1:]):
        yield [[seqs[0]], *rest]
        for index, group in enumerate(rest):
            yield [*rest[:index], [seqs[0], *group], *rest[index + 1 :]]


def shared_blocks(tables: Sequence[Sequence[int]]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda blocks: len(set(blocks)) == 1, zip(*tables, strict=False)))


@pytest.mark.parametrize("seed", range(30))
def test_hardly_any_other_groups_save_more(seed: int) -> None:
    """The best of all groupings saves at most a tenth more."""
    rng = random.Random(seed)
    tables = [[rng.randrange(2) for _ in range(rng.randrange(1, 6))] for _ in range(rng.randrange(1, 7))]
    found = find(tables, [TOKENS_PER_BLOCK * len(table) for table in tables])
    for group, keys in groups_of(found):
        assert keys <= shared_blocks([tables[seq] for seq in group]) * TOKENS_PER_BLOCK
        assert all(found.own_starts[seq] == keys for seq in group)
    assert sorted(found.members.tolist()) == list(range(len(tables)))
    saved = max(
        sum((len(group) - 1) * shared_blocks([tables[seq] for seq in group]) for group in partition)
        for partition in partitions(range(len(tables)))
    )
    assert 0.9 * saved * TOKENS_PER_BLOCK <= found.num_saved_keys <= saved * TOKENS_PER_BLOCK
    assert found.num_saved_keys == sum((len(group) - 1) * keys for group, keys in groups_of(found))


def test_which_blocks_it_is_makes_no_difference() -> None:
    rng = random.Random(1)
    tables = [[rng.randrange(3) for _ in range(6)] for _ in range(20)]
    results = []
    for names in ([0, 1, 2], [2, 0, 1], [1, 300, 77]):
        found = find([[names[block] for block in table] for table in tables], [24] * 20)
        results.append(groups_of(found))
    assert len(results[0]) > 2
    assert results[0] == results[1] == results[2]


def test_many_levels_are_no_recursion() -> None:
    """Each of 1,500 sequences shares a block more with the next."""
    tables = [[*range(depth), 10_000 + depth] for depth in range(1, 1501)]
    assert find(tables, [4 * len(table) for table in tables]).num_saved_keys > 0


def test_rows_of_the_index_are_aligned() -> None:
    """Kernels are compiled once more for each kind of alignment."""
    for num_seqs in range(1, 9):
        index = find([[1]] * num_seqs, [4] * num_seqs).index
        assert (index.dtype, index.stride(0) % 4, index.stride(1)) == (torch.int32, 0, 1)


def test_sharing_is_looked_for_where_triton_runs_and_used_where_it_pays() -> None:
    """Tensors without memory stand for those of CUDA."""
    kv_layer = torch.empty((4000, 2, 16, 8, 128), dtype=torch.bfloat16, device="meta")
    tables = torch.cat([torch.arange(1000).expand(16, 1000), 1000 + torch.arange(16)[:, None]], dim=1)
    lens = torch.full((16,), 16_003)
    assert find_shared_prefixes(tables, lens, torch.empty(1, 2, 16, 8, 128), 32) is None
    found = find_shared_prefixes(tables, lens, kv_layer, 32)
    assert found is not None
    assert (found.index.device.type, found.num_saved_keys) == ("meta", 15 * 16_000)
    assert find_shared_prefixes(tables, lens, kv_layer, 32, replayed=True) is None
    longer = tables.repeat_interleave(2, dim=1)
    assert find_shared_prefixes(longer, lens * 2, kv_layer, 32, replayed=True) is not None
    assert find_shared_prefixes(tables, lens // 1000, kv_layer, 32) is None
    assert find_shared_prefixes(tables[:0], lens[:0], kv_layer, 32) is None
    assert find_shared_prefixes(tables[:1], lens[:1], kv_layer, 32) is None
