"""One stream of frames, put together to blocks."""

from kvtier.codec.stored_form import Header, parse_header
from kvtier.errors import CorruptBlockError, InvalidInputError, LimitExceededError
from kvtier.identity.keys import StoreKey, TenantId
from kvtier.memory.pages import copy_bytes
from kvtier.protocol.frames import Frame
from kvtier.store.store import Store
from kvtier.tiers.base import WriteStatus
from kvtier.tiers.host.slots import WriteSlot
from kvtier_pool.limits import PoolLimits


class Upload:
    """Takes the frames of one Write call in order. For one thread; `close` in every case.

    A block is in a slot of memory that nobody else sees until its last byte has come and its checksum
    holds. At most one slot is held at a time.
    """

    def __init__(self, core: Store, tenant: TenantId, limits: PoolLimits, *, refuses: bool = False) -> None:
        """:param refuses: takes no block: all are THROTTLED."""
        self._core = core
        self._tenant = tenant
        self._limits = limits
        self._refuses = refuses
        self._statuses: list[WriteStatus] = []
        """The statuses of the blocks before the current one, and of the current one once it is decided."""
        self._num_begun = 0
        self._header: Header | None = None
        """The header of the current block while its slot is being filled."""
        self._slot: WriteSlot | None = None
        self._num_filled = 0
        """Bytes in `_slot`."""
        self._num_bytes = 0
        """Payload bytes of the whole stream."""
        self._stored: list[StoreKey] = []

    def feed(self, frame: Frame) -> None:
        """The next frame. `InvalidInputError`: blocks out of order. `LimitExceededError`: the stream is too long."""
        self._num_bytes += len(frame.payload)
        if self._num_bytes > self._limits.max_batch_bytes:
            raise LimitExceededError(
                f"max_batch_bytes: more than {self._limits.max_batch_bytes} in one write; split it"
            )
        if frame.block == self._num_begun:
            self._end_block()
            self._begin_block(frame)
        elif frame.block != self._num_begun - 1 or frame.header:
            raise InvalidInputError(
                f"frame of block {frame.block} after block {self._num_begun - 1}: number blocks from 0, one after "
                "the other, with one header each"
            )
        elif not frame.payload:
            raise InvalidInputError(f"frame of block {frame.block} with neither header nor payload: leave it out")
        if self._slot is not None and self._header is not None:
            self._fill(self._slot, self._header, frame.payload)

    def finish(self) -> bytes:
        """A `WriteStatus` byte per block. The stream ended as it should."""
        self._end_block()
        return bytes(self._statuses)

    def close(self) -> None:
        """Gives back the slot of a block that did not arrive."""
        self._end_block()
        self._core.touch(self._stored)

    def _begin_block(self, frame: Frame) -> None:
        if self._num_begun == self._limits.max_batch_blocks:
            raise LimitExceededError(
                f"max_batch_blocks: more than {self._limits.max_batch_blocks} in one write; split it"
            )
        self._num_begun += 1
        try:
            header = parse_header(frame.header)
        except CorruptBlockError:
            self._statuses.append(WriteStatus.FAILED)
            return
        if self._refuses:
            self._statuses.append(WriteStatus.THROTTLED)
            return
        if header.stored_length > self._limits.max_block_bytes:
            self._statuses.append(WriteStatus.FULL)
            return
        outcome = self._core.begin_write(self._tenant, header.key, header.stored_length)
        if isinstance(outcome, WriteStatus):
            self._statuses.append(outcome)
        else:
            self._slot, self._header, self._num_filled = outcome, header, 0

    def _fill(self, slot: WriteSlot, header: Header, payload: memoryview) -> None:
        end = self._num_filled + len(payload)
        if end > len(slot.view):
            self._end_block()
            return
        copy_bytes(slot.view[self._num_filled : end], payload)
        self._num_filled = end
        if end == len(slot.view):
            self._slot = None
            self._statuses.append(self._core.commit_write(slot, header))
            if self._statuses[-1] is WriteStatus.STORED:
                self._stored.append(slot.key)

    def _end_block(self) -> None:
        """The current block is over; if it is not complete by now, it failed."""
        slot, self._slot = self._slot, None
        if slot is not None:
            self._statuses.append(self._core.abort_write(slot))
