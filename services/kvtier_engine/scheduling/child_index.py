"""Which blocks follow a block, found by their first tokens: for reuse of the leading tokens of a block.

Where a prompt leaves a known prefix in the middle of a block, no block has its next key, but a sibling may begin with
the same tokens. The siblings of a block, which are the children of one parent, are sorted by their tokens. The one
that has most leading tokens in common with a prompt is then next to the place at which the prompt would be. That finds
what a radix tree over tokens finds (SGLang's `RadixCache`), and keys stay those of whole blocks.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtier.errors import InvariantError
from kvtier.identity.keys import BlockHasher, BlockKey

Parent = BlockKey | BlockHasher
"""The key of the block before. Before a first block there is none: then the hasher, whose tenant and salt separate
chains from the start."""

_Child = tuple[tuple[int, ...], BlockKey]


@dataclass(frozen=True, slots=True)
class Sibling:
    """A block whose first `num_tokens` tokens are those of a prompt."""

    key: BlockKey
    num_tokens: int


class ChildIndex:
    """Children of blocks by their tokens. Scheduler thread only.

    Knows nothing of where blocks are: they may have left the device, and every tier. Blocks that were added or
    touched longest ago are forgotten first. A block takes about 500 bytes, `add` about 2 us.
    """

    def __init__(self, max_blocks: int) -> None:
        """:param max_blocks: the most blocks that are remembered, at least 1."""
        self._max_blocks = max_blocks
        self._known: OrderedDict[BlockKey, tuple[Parent, tuple[int, ...]]] = OrderedDict()
        """The parent and the tokens of each block, the one that was used longest ago first."""
        self._children: dict[Parent, list[_Child]] = {}
        """Sorted by tokens; none is empty."""

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._known

    def add(self, parent: Parent, key: BlockKey, tokens: Sequence[int]) -> None:
        """Remembers a full block, or that it was used.

        :param tokens: all of the block.
        """
        if key in self._known:
            self._known.move_to_end(key)
            return
        if len(self._known) >= self._max_blocks:
            self._forget_oldest()
        of_block = tuple(tokens)
        self._known[key] = parent, of_block
        insort(self._children.setdefault(parent, []), (of_block, key))

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Notes a use of those of `keys` that are known."""
        for key in keys:
            if key in self._known:
                self._known.move_to_end(key)

    def siblings(self, parent: Parent, tokens: Sequence[int]) -> Iterator[Sibling]:
        """Children of `parent` that begin with the first of `tokens`, those with most tokens in common first.

        Several have as many in common where they differ from each other only later.
        """
        children = self._children.get(parent, [])
        wanted = tuple(tokens)
        right = bisect_left(children, (wanted,))  # a shorter tuple sorts before
        left = right - 1
        on_left, on_right = _common(children, left, wanted), _common(children, right, wanted)
        while on_left or on_right:
            if on_left >= on_right:
                yield Sibling(children[left][1], on_left)
                left -= 1
                on_left = _common(children, left, wanted)
            else:
                yield Sibling(children[right][1], on_right)
                right += 1
                on_right = _common(children, right, wanted)

    def clear(self) -> None:
        """Forgets all blocks."""
        self._known.clear()
        self._children.clear()

    def check(self) -> None:
        """Verifies both maps against each other; raises `InvariantError`."""
        listed = {key: (parent, tokens) for parent, all_of in self._children.items() for tokens, key in all_of}
        if listed != dict(self._known) or len(listed) > self._max_blocks:
            raise InvariantError(f"{len(listed)} children are listed, {len(self._known)} known")
        if any(not children or children != sorted(children) for children in self._children.values()):
            raise InvariantError("the children of a block are not sorted, or none")

    def _forget_oldest(self) -> None:
        key, (parent, tokens) = self._known.popitem(last=False)
        children = self._children[parent]
        del children[bisect_left(children, (tokens, key))]
        if not children:
            del self._children[parent]


def _common(children: Sequence[_Child], index: int, wanted: Sequence[int]) -> int:
    """The number of leading tokens that the child at `index` has in common with `wanted`; 0 beyond either end."""
    if not 0 <= index < len(children):
        return 0
    num_common = 0
    for of_child, of_prompt in zip(children[index][0], wanted, strict=False):
        if of_child != of_prompt:
            break
        num_common += 1
    return num_common
