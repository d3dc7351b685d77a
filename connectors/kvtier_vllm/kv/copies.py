"""Which device blocks are being copied at this moment: whatever writes to them must wait."""

from collections.abc import Iterable

from kvtier.offload.messages import Copied, SaveBatch, ToDirectory, ToMover
from kvtier_vllm.kv.groups import KVGroups


class CopiesUnderWay:
    """Save batches that some rank may still be reading from the device. Scheduler thread only."""

    def __init__(self, groups: KVGroups) -> None:
        self.num_ranks = 1
        self._groups = groups
        self._ranks: dict[int, set[int]] = {}
        """Ranks that have copied a batch, by the batch's id."""
        self._device_blocks: dict[int, list[int]] = {}
        """Device blocks of a batch, by the batch's id."""
        self._batch_of: dict[int, int] = {}
        """The batch that reads a device block, by device block: the latest if there are several."""

    def __bool__(self) -> bool:
        return bool(self._device_blocks)

    def begin(self, messages: Iterable[ToMover]) -> None:
        """The directory's messages for the movers."""
        for message in messages:
            if isinstance(message, SaveBatch):
                self._ranks[message.batch_id] = set()
                device_blocks = self._groups.device_blocks(message.device_slots)
                self._device_blocks[message.batch_id] = device_blocks
                self._batch_of.update(dict.fromkeys(device_blocks, message.batch_id))

    def end(self, rank: int, messages: Iterable[ToDirectory]) -> None:
        """A mover's answers."""
        for message in messages:
            if isinstance(message, Copied):
                copied = self._ranks[message.batch_id]
                copied.add(rank)
                if len(copied) == self.num_ranks:
                    self._forget(message.batch_id)

    def of(self, device_blocks: Iterable[int]) -> list[int]:
        """Batches that read one of these."""
        return sorted({self._batch_of[block] for block in device_blocks if block in self._batch_of})

    def _forget(self, batch_id: int) -> None:
        del self._ranks[batch_id]
        for block in self._device_blocks.pop(batch_id):
            if self._batch_of.get(block) == batch_id:
                del self._batch_of[block]
