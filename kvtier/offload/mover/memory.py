"""The memory that a mover copies between, and the names that its blocks have in tiers."""

from collections.abc import Iterable

from kvtier.device.kv import DeviceKV
from kvtier.errors import InvalidInputError
from kvtier.identity.keys import BlockKey, NamespaceId, StoreKey, rank_keys
from kvtier.memory.arena import Arena


class BlockMemory:
    """The device and the arena of one rank. The fields are set once; any thread may read them."""

    def __init__(self, namespace: NamespaceId, device: DeviceKV, arena: Arena) -> None:
        """Raises `InvalidInputError` if the arena's slots are too small for blocks of the device.

        :param namespace: the one of the rank's blocks in tiers.
        """
        if arena.slot_bytes < device.block_bytes:
            raise InvalidInputError(
                f"arena slots of {arena.slot_bytes} bytes cannot hold blocks of {device.block_bytes}"
            )
        self.device, self.arena = device, arena
        self.block_bytes = device.block_bytes
        self._namespace = namespace

    def store_keys(self, keys: Iterable[bytes]) -> list[StoreKey]:
        """Returns the keys that tiers know these blocks of the rank by, in order."""
        return rank_keys(map(BlockKey, keys), self._namespace)

    def view(self, slot: int) -> memoryview:
        """Returns the bytes of the block in a slot of the arena, `block_bytes` of them; nothing is copied."""
        return self.arena.view(slot)[: self.block_bytes]
