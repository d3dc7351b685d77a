"""The arena: the host tier's memory and, when there is no host tier, the staging area. One row per slot.

It is preallocated and touched, because a copy into fresh pages runs at a tenth of the speed.
"""

import os

import numpy as np

from kvtier.errors import ClosedError, ConfigError, InvalidInputError
from kvtier.memory import memfd
from kvtier.memory.buffers import Bytes2D
from kvtier.memory.numa import prefer_node
from kvtier.memory.pages import map_memory, touch_pages


class Arena:
    """`num_slots` slots of `slot_bytes` host memory. The owner of the slots decides which thread may touch which.

    Holds no bookkeeping and no lock: the owner hands out slot ids and keeps writers apart.
    """

    def __init__(self, num_slots: int, slot_bytes: int, *, shared: bool = False, numa_node: int | None = None) -> None:
        """Allocates and touches all memory: see `touch_pages`.

        Raises `ConfigError` when the system does not have that much, or cannot share it.

        :param shared: a memfd of fixed size, which a tier process can map: copies are as fast. Otherwise anonymous
            memory, whose first touch takes a fraction of the time where only that has huge pages.
        :param numa_node: where the memory comes from while there is any. None: from wherever the system takes it.
        """
        if num_slots < 1 or slot_bytes < 1:
            raise InvalidInputError(f"arena of {num_slots} slots x {slot_bytes} bytes: both must be at least 1")
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self._rows: Bytes2D | None = None
        self._descriptor: int | None = None
        nbytes = num_slots * slot_bytes
        try:
            if shared:
                self._descriptor = memfd.create("kvtier-arena", nbytes)
                memory = memfd.map_new(self._descriptor, nbytes, prefault=False)
            else:
                memory = map_memory(nbytes, prefault=False)
            if numa_node is not None:
                prefer_node(memory, numa_node)
            touch_pages(memory)
        except (OSError, OverflowError) as error:
            self.close()
            raise ConfigError(
                f"host memory for {num_slots:,} slots of {slot_bytes:,} bytes cannot be had: {error}; "
                "lower host.capacity_bytes"
            ) from error
        self._rows = np.frombuffer(memory, dtype=np.uint8).reshape(num_slots, slot_bytes)

    @property
    def rows(self) -> Bytes2D:
        """`[num_slots, slot_bytes]` view of all memory."""
        if self._rows is None:
            raise ClosedError("the arena is closed")
        return self._rows

    def view(self, slot: int) -> memoryview:
        """Writable view of one slot."""
        return memoryview(self.rows[slot])

    @property
    def memory(self) -> memoryview:
        """The whole memory, slot after slot; writable."""
        return self.rows.reshape(-1).data

    @property
    def descriptor(self) -> int:
        """The memfd of a shared arena; open until `close`."""
        if self._descriptor is None:
            raise InvalidInputError("the arena is not shared, or closed")
        return self._descriptor

    def close(self) -> None:
        """Drops the memory as soon as the last view of it is gone. Idempotent."""
        self._rows = None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
