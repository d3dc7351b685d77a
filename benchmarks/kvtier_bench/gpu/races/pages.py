"""KV whose bytes tell what it is: of which content, and from which place."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_BY_CONTENT, _BY_WORD, _BY_PART = -7046029254386353131, 0x2545F4914F6CDD1D, 0x0632BE59BD9B4E01
"""Odd numbers with bits all over: two contents differ in nearly every byte."""


@dataclass(frozen=True, slots=True)
class Places:
    """Device slots of one KV group."""

    group: int
    blocks: Tensor
    """Numbers of the blocks in the group, int64 on the device."""
    indexes: Tensor
    """Indexes of these slots among all that were asked for, int64 on the device."""


class Pages:
    """Blocks of KV groups, each in several parts, and how many were found wrong.

    All work is queued on the current stream. A content is a number that no two computed blocks have in common.
    """

    def __init__(
        self, device: torch.device, *, num_blocks: int, part_bytes: int, parts: Sequence[int], rounds: int
    ) -> None:
        """:param parts: how many parts a block has, by KV group."""
        self.device, self._num_blocks = device, num_blocks
        bytes_of = [torch.zeros((count, num_blocks, part_bytes), dtype=torch.uint8, device=device) for count in parts]
        self.groups = [of_group.unbind() for of_group in bytes_of]
        """The parts of each group, uint8 `[num_blocks, part_bytes]` each."""
        self._words = [of_group.view(torch.int64) for of_group in bytes_of]
        """int64 `[parts, num_blocks, part_words]`, by group: all parts are computed and compared at once."""
        self._ramp = torch.arange(part_bytes // 8, dtype=torch.int64, device=device) * _BY_WORD
        self.wrong = torch.zeros(rounds, dtype=torch.int64, device=device)
        """The number of blocks that held something else, by round. int64 on the device."""

    @property
    def part_words(self) -> int:
        """The number of words of 8 bytes in a part of a block."""
        return self._ramp.numel()

    def index(self, numbers: Sequence[int]) -> Tensor:
        """The numbers as int64 on the device. It waits for nothing."""
        return torch.tensor(numbers, dtype=torch.int64).to(self.device, non_blocking=True)

    def places(self, slots: Sequence[int]) -> list[Places]:
        """The places of these device slots, by KV group."""
        found = []
        for group in range(len(self.groups)):
            indexes = [index for index, slot in enumerate(slots) if slot // self._num_blocks == group]
            blocks = [slots[index] % self._num_blocks for index in indexes]
            found.append(Places(group, self.index(blocks), self.index(indexes)))
        return found

    def write(self, places: Sequence[Places], contents: Tensor) -> None:
        """Writes what computing these contents would write."""
        for where in places:
            words = self._words[where.group]
            words[:, where.blocks] = self._expected(contents[where.indexes], len(words))

    def zero(self, places: Sequence[Places]) -> None:
        """Clears these blocks."""
        for where in places:
            self._words[where.group][:, where.blocks] = 0

    def check(self, places: Sequence[Places], contents: Tensor, round_number: int, layer: slice = slice(None)) -> None:
        """Counts the blocks that hold anything else.

        :param layer: the words of each part that are looked at.
        """
        for where in places:
            words = self._words[where.group]
            differs = words[:, where.blocks] != self._expected(contents[where.indexes], len(words))
            self.wrong[round_number] += differs[:, :, layer].any(dim=2).any(dim=0).sum()

    def payload(self, content: int) -> npt.NDArray[np.uint8]:
        """The bytes of such a block of the first group in host memory, part after part, computed on the CPU."""
        ramp = torch.arange(self._ramp.numel()) * _BY_WORD
        words = _expected(torch.tensor([content]), ramp, len(self.groups[0]))
        return words.view(torch.uint8).reshape(-1).numpy()

    def _expected(self, contents: Tensor, num_parts: int) -> Tensor:
        return _expected(contents, self._ramp, num_parts)


def _expected(contents: Tensor, ramp: Tensor, num_parts: int) -> Tensor:
    """The words of blocks with these contents, int64 `[num_parts, num_blocks, words]`. Products and sums wrap."""
    by_part = torch.arange(num_parts, device=ramp.device) * _BY_PART
    return contents[None, :, None] * _BY_CONTENT + ramp + by_part[:, None, None]
