"""Which sequences of a batch share a run of leading blocks: found on the host, once per step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 4
"""Numbers of 16 bytes: rows of the index start there, so that kernels are compiled for one alignment only."""


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Disjoint groups of a batch's sequences, and how many leading keys the sequences of each group share.

    For batches with one query per sequence: `shared_prefix_decode` reads what a group shares once. Sequences that share
    nothing are the last group, with no keys.
    """

    index: Tensor
    """int32 `[4, columns]`, its rows being the properties below: one tensor, so that it takes one copy to a device."""
    num_seqs: int
    group_sizes: tuple[int, ...]
    """How many sequences each group has that shares something."""
    shared_keys: tuple[int, ...]
    """How many leading keys each group of `group_sizes` shares."""
    num_saved_keys: int
    """Keys that are not read again because their group reads them once."""
    num_own_keys: int
    """Keys that are one sequence's alone, summed over all sequences; `max_own_keys` is the most of any sequence."""
    max_own_keys: int

    @property
    def num_groups(self) -> int:
        """The number of groups, with a last one of sequences that share nothing, where there are such."""
        return len(self.group_sizes) + (sum(self.group_sizes) < self.num_seqs)

    @property
    def members(self) -> Tensor:
        """`[num_seqs]`: the sequences, group by group."""
        return self.index[0, : self.num_seqs]

    @property
    def group_starts(self) -> Tensor:
        """`[num_groups + 1]`: where in `members` each group starts."""
        return self.index[1, : self.num_groups + 1]

    @property
    def group_keys(self) -> Tensor:
        """`[num_groups]`: leading keys that the sequences of a group share. Whole blocks."""
        return self.index[2, : self.num_groups]

    @property
    def own_starts(self) -> Tensor:
        """`[num_seqs]`: the first key of each sequence that is not its group's."""
        return self.index[3, : self.num_seqs]

    @classmethod
    def of(cls, block_tables: Tensor, seq_lens: Tensor, tokens_per_block: int) -> Self:
        """Groups whose first blocks are the same, chosen so that few keys are read. Only full blocks count.

        A sequence is in one group: of sequences that share a system prompt, those that share a long document after it
        may be a group of their own, the others another one. Which it is does not depend on which physical blocks there
        are, only on which are the same.

        :param block_tables: int32 or int64 `[num_seqs, max_blocks]` on CPU; entries beyond a sequence's blocks may be
            anything.
        :param seq_lens: int32 or int64 `[num_seqs]` on CPU.
        :returns: with its index on CPU.
        """
        num_seqs, width = block_tables.shape
        num_full = (seq_lens // tokens_per_block).numpy()
        # Beyond its full blocks a sequence shares nothing: there it has a number of its own.
        blocks = np.repeat(-1 - np.arange(num_seqs)[:, None], width + 1, axis=1)
        np.copyto(blocks[:, :width], block_tables.numpy(), where=np.arange(width) < num_full[:, None])
        # Any order will do in which rows that begin alike are neighbours: that of their bytes is fast.
        order = sorted(range(num_seqs), key=[row.tobytes() for row in blocks].__getitem__)
        ordered = blocks[order]
        alike = (ordered[1:] != ordered[:-1]).argmax(axis=1).tolist()
        # In an order that does not depend on the numbers of blocks.
        groups = [_Group(sorted(group.members), group.num_blocks) for group in _groups(order, alike)]
        sharing = sorted((group for group in groups if group.num_blocks), key=lambda group: group.members)
        alone = sorted(group.members[0] for group in groups if not group.num_blocks)
        return cls._build([*sharing, _Group(alone)] if alone else sharing, seq_lens, tokens_per_block)

    @classmethod
    def _build(cls, groups: Sequence["_Group"], seq_lens: Tensor, tokens_per_block: int) -> Self:
        num_seqs = seq_lens.numel()
        members, starts, keys, own_starts = [], [0], [], [0] * num_seqs
        for group in groups:
            members += group.members
            starts.append(len(members))
            keys.append(group.num_blocks * tokens_per_block)
            for seq in group.members:
                own_starts[seq] = keys[-1]
        columns = -(-(num_seqs + 1) // _ALIGNMENT) * _ALIGNMENT
        index = torch.zeros((4, columns), dtype=torch.int32)
        for row, numbers in enumerate((members, starts, keys, own_starts)):
            index[row, : len(numbers)] = torch.tensor(numbers, dtype=torch.int32)
        sharing = [group for group in groups if group.num_blocks]
        num_own_keys = seq_lens - index[3, :num_seqs]
        return cls(
            index=index,
            num_seqs=num_seqs,
            group_sizes=tuple(len(group.members) for group in sharing),
            shared_keys=tuple(group.num_blocks * tokens_per_block for group in sharing),
            num_saved_keys=sum(group.num_saved for group in groups) * tokens_per_block,
            num_own_keys=int(num_own_keys.sum()),
            max_own_keys=int(num_own_keys.max()) if num_seqs else 0,
        )

    def to(self, device: torch.device) -> Self:
        """Returns these prefixes with the index on `device`. Waits for nothing."""
        return replace(self, index=self.index.to(device, non_blocking=True))


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences that share so many blocks; one alone shares none."""

    members: list[int]
    num_blocks: int = 0

    @property
    def num_saved(self) -> int:
        return (len(self.members) - 1) * self.num_blocks


def _groups(order: Sequence[int], alike: Sequence[int]) -> list[_Group]:
    """Groups that save many blocks, and sequences alone. Every sequence is in one of them.

    Starts with sequences alone, and joins runs of neighbours where they have most in common first: so what is between
    two runs is all that their sequences have in common. There, what saves more than it did before becomes one group. As
    a group is never taken apart again, others may save a little more, where prefixes are nested more than twice.

    :param order: sequences, those that begin alike side by side.
    :param alike: how many leading blocks each of them shares with the next.
    """
    # By position in `order`: the ends of each run know its groups and its other end.
    runs = [(index, index, [_Group([seq])]) for index, seq in enumerate(order)]
    for gap in sorted(range(len(alike)), key=alike.__getitem__, reverse=True):
        num_blocks = alike[gap]
        if num_blocks == 0:
            break
        (first, _, left), (_, last, right) = runs[gap], runs[gap + 1]
        joining: list[_Group] = []
        apart: list[_Group] = []
        for group in left + right:
            (joining if len(group.members) * num_blocks > group.num_saved else apart).append(group)
        joined = _Group([seq for group in joining for seq in group.members], num_blocks)
        if joining and joined.num_saved > sum(group.num_saved for group in joining):
            joining = [joined]
        runs[first] = runs[last] = (first, last, joining + apart)
    groups, index = [], 0
    while index < len(runs):
        _, last, of_run = runs[index]
        groups += of_run
        index = last + 1
    return groups
