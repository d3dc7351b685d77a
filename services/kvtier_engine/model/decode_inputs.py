"""What captured decodes read: tensors whose addresses stay the same from step to step."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvtier_engine.model.llama import Chunk

_NOTHING = (0, 0, -1, 0, 0)
"""The numbers of a row without a sequence: token, position, block, offset, length. It writes and reads no block."""

_ALIGNMENT = 2
"""Numbers of 16 bytes: what kernels take starts there, so that they are compiled for one alignment only."""


class DecodeInputs:
    """One row for each sequence of a step in which every sequence has one new token. Engine's thread only.

    Block tables stay on the device and are only amended: in most steps, no sequence has a new block. Everything else is
    written anew for all rows in every step.
    """

    def __init__(self, num_rows: int, table_width: int, tokens_per_block: int, device: torch.device) -> None:
        """
        :param num_rows: the most sequences of a step.
        :param table_width: the most blocks of a sequence.
        """
        self.num_rows, self.table_width = num_rows, table_width
        self._tokens_per_block = tokens_per_block
        self._num_columns = -(-num_rows // _ALIGNMENT) * _ALIGNMENT
        self._numbers = torch.tensor([_NOTHING] * self._num_columns, dtype=torch.int64).T.contiguous()
        """`[5, num_columns]`: token, position, block, offset, length."""
        self._tables = torch.full((num_rows, table_width), -1, dtype=torch.int64)
        self._blocks: list[list[int]] = [[] for _ in range(num_rows)]
        """What each row of the tables begins with; the rest is of earlier steps."""
        self._numbers_there = self._numbers.to(device, copy=True)
        self._tables_there = self._tables.to(device, copy=True)

    @property
    def token_ids(self) -> Tensor:
        """int64 `[num_rows]` on the device, as are the next four; 0 in rows without a sequence."""
        return self._numbers_there[0, : self.num_rows]

    @property
    def positions(self) -> Tensor:
        """The positions of the tokens; 0 in rows without a sequence."""
        return self._numbers_there[1, : self.num_rows]

    @property
    def block_ids(self) -> Tensor:
        """The blocks to which the tokens' keys and values go; -1 in rows without a sequence: nowhere."""
        return self._numbers_there[2, : self.num_rows]

    @property
    def offsets(self) -> Tensor:
        """The places of the tokens in these blocks; 0 in rows without a sequence."""
        return self._numbers_there[3, : self.num_rows]

    @property
    def seq_lens(self) -> Tensor:
        """The number of keys of each sequence, those of the new tokens included; 0 in rows without a sequence."""
        return self._numbers_there[4, : self.num_rows]

    @property
    def block_tables(self) -> Tensor:
        """int64 `[num_rows, table_width]` on the device; entries beyond a sequence's blocks may be anything."""
        return self._tables_there

    def holds(self, chunks: Sequence[Chunk]) -> bool:
        """Whether there is room for these, and each has one token."""
        return len(chunks) <= self.num_rows and all(
            len(chunk.token_ids) == 1 and len(chunk.block_table) <= self.table_width for chunk in chunks
        )

    def fill(self, chunks: Sequence[Chunk]) -> None:
        """Makes them the batch, in the first rows; `holds` has said that they fit.

        Waits until what was launched before is done, so that nothing still reads what is overwritten, on the host
        neither. The device computes nothing meanwhile that it would have computed otherwise.
        """
        tokens_per_block = self._tokens_per_block
        rows = [
            (
                chunk.token_ids[0],
                chunk.start,
                chunk.block_table[chunk.start // tokens_per_block],
                chunk.start % tokens_per_block,
                chunk.start + 1,
            )
            for chunk in chunks
        ]
        rows += [_NOTHING] * (self._num_columns - len(chunks))
        self._numbers.numpy()[:] = np.array(rows, dtype=np.int64).T
        self._numbers_there.copy_(self._numbers)
        changed = [row for row, chunk in enumerate(chunks) if self._amend(row, chunk.block_table)]
        if changed:
            # In one copy, whichever rows lie between them.
            between = slice(changed[0], changed[-1] + 1)
            self._tables_there[between].copy_(self._tables[between])

    def tables_on_host(self, chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor]:
        """Block tables and lengths of the chunks last given to `fill`, on CPU. The tables are views."""
        widest = max(len(chunk.block_table) for chunk in chunks)
        return self._tables[: len(chunks), :widest], self._numbers[4, : len(chunks)]

    def _amend(self, row: int, block_table: Sequence[int]) -> bool:
        """Whether the row's table had to be changed on the host."""
        blocks, held = list(block_table), self._blocks[row]
        if blocks == held:
            return False
        # Comparing two lists takes a fortieth of the time that writing one into a tensor does.
        num_kept = len(held) if blocks[: len(held)] == held else 0
        self._tables.numpy()[row, num_kept : len(blocks)] = blocks[num_kept:]
        self._blocks[row] = blocks
        return True
