"""Siblings by their tokens, against a search through all of them."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.identity.keys import BlockKey
from kvtier_engine.scheduling.child_index import ChildIndex

_TOKENS = st.lists(st.integers(0, 2), min_size=4, max_size=4)
_PARENTS = st.sampled_from([BlockKey(bytes([i]) * 48) for i in range(3)])


def _common(left: list[int], right: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@settings(max_examples=200, deadline=None)
@given(
    blocks=st.lists(st.tuples(_PARENTS, _TOKENS), max_size=40, unique_by=lambda block: (block[0], tuple(block[1]))),
    room=st.integers(1, 50),
    parent=_PARENTS,
    wanted=st.lists(st.integers(0, 2), min_size=1, max_size=4),
    again=st.integers(0, 39),
)
def test_all_siblings_the_longest_common_run_first(
    blocks: list[tuple[BlockKey, list[int]]], room: int, parent: BlockKey, wanted: list[int], again: int
) -> None:
    index = ChildIndex(room)
    order: list[int] = []
    for number, (of, tokens) in enumerate(blocks):
        index.add(of, BlockKey(number.to_bytes(48, "big")), tokens)
        order.append(number)
        if number == again % max(1, len(blocks)) and number - 1 in order[-room:]:
            index.touch([BlockKey((number - 1).to_bytes(48, "big"))])
            order.remove(number - 1)
            order.append(number - 1)
        index.check()
    kept = order[-room:]
    assert len(index) == len(kept)
    expected = sorted(
        (_common(blocks[number][1], wanted) for number in kept if blocks[number][0] == parent), reverse=True
    )
    found = list(index.siblings(parent, wanted))
    assert [sibling.num_tokens for sibling in found] == [count for count in expected if count]
    for sibling in found:
        assert _common(blocks[int.from_bytes(sibling.key, "big")][1], wanted) == sibling.num_tokens


def test_a_block_that_is_used_again_is_forgotten_later() -> None:
    index = ChildIndex(2)
    parent, keys = BlockKey(b"p" * 48), [BlockKey(bytes([i]) * 48) for i in range(3)]
    index.add(parent, keys[0], [1, 2])
    index.add(parent, keys[1], [1, 3])
    index.add(parent, keys[0], [1, 2])
    index.add(parent, keys[2], [1, 4])
    assert [key in index for key in keys] == [True, False, True]
    index.clear()
    index.check()
    assert not list(index.siblings(parent, [1]))
