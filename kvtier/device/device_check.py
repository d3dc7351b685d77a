"""Whether blocks have arrived on the device as they were: their checksums there beside those of host memory or writers.

A tier's checksum says that the bytes in host memory are right. What happens to them after that, on the bus and in the
kernels that put them into their places, only a look at the device's memory can tell.
"""

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from kvtier.errors import InvalidInputError
from kvtier.memory.buffers import Bytes2D
from kvtier_kernels.copies.block_checksum import block_checksum, is_in_words
from kvtier_kernels.copies.part_copy import Parts
from kvtier_kernels.xxh3 import LEAST_BYTES, WORD_BYTES

DEFAULT_EVERY = 64
"""The number of blocks of which one is compared with host memory, by the thread that loads: a load of 64 blocks of
2 MiB takes 2.4 ms over a bus of 55 GB/s, and its one checksum takes 65 us of a core."""
_ZEROS = bytes(-(-LEAST_BYTES // WORD_BYTES) * WORD_BYTES)
"""The prefix of blocks that are compared with host memory: with it, none is too short for the device."""

_BYTES_AT_A_TIME, _BLOCKS_AT_A_TIME = 64 << 20, 128
"""The most that checksums are computed of at a time. A sixteenth of it is taken beside an engine's KV meanwhile."""

Slots = Sequence[int] | npt.NDArray[np.int64]


class DeviceCheck:
    """Compares blocks that a copy has brought to the device: a sample of them with host memory, or all of them with
    their writers' checksums. Any thread, several at a time."""

    def __init__(self, parts: Sequence[Parts], *, every: int = DEFAULT_EVERY) -> None:
        """Compiles the kernels on the stream that is current: a few seconds, the first time. Reads no block.

        :param parts: of all blocks on the device, as `block_checksum` takes them. In host memory a block is the same
            bytes, part after part; not the records of a lossy codec.
        :param every: one block in so many is looked at by `wrong`, and at least one of each load. 1 looks at all of
            them, which may cost more than the load; with many, damage of few blocks is found late.
        :raises InvalidInputError: blocks that `can_check` says no of, or `every` less than 1.
        """
        if every < 1:
            raise InvalidInputError(f"one block in {every} to be checked: needs at least 1")
        if not self.can_check(parts, prefix_bytes=len(_ZEROS)):
            raise InvalidInputError(
                f"parts of {sorted({group.tensors[0].size(1) for group in parts})} bytes: on the device, only blocks "
                f'whose parts begin and end at multiples of {WORD_BYTES} bytes can be verified; verify on the "host"'
            )
        self._parts, self._every = tuple(parts), every
        self._block_bytes = sum(group.block_bytes for group in parts)
        self._most_at_a_time = min(max(1, _BYTES_AT_A_TIME // self._block_bytes), _BLOCKS_AT_A_TIME)
        self._device = parts[0].tensors[0].device
        self._lock = threading.Lock()
        self._num_loaded = 0  # guarded by _lock: blocks of all loads so far
        self.get_ready()

    def get_ready(self) -> None:
        """Takes the memory on the device, 4 MiB or so, that checksums on the current stream need: it may be taken by
        others later. Reads no block, and waits.

        :raises torch.OutOfMemoryError: there is no room for it.
        """
        num_blocks = self._most_at_a_time
        self._checksums([-1] * num_blocks, _ZEROS * num_blocks).cpu()

    @staticmethod
    def can_check(parts: Sequence[Parts], *, prefix_bytes: int) -> bool:
        """Whether the device can compute checksums of such blocks behind prefixes of so many bytes.

        It can where parts and prefixes are whole words of 8 bytes, of at least 241 bytes together.
        """
        num_bytes = prefix_bytes + sum(group.block_bytes for group in parts)
        return prefix_bytes % WORD_BYTES == 0 and num_bytes >= LEAST_BYTES and all(map(is_in_words, parts))

    def mismatches(self, device_slots: Slots, prefixes: Sequence[bytes], checksums: Sequence[int]) -> list[int]:
        """Which blocks on the device have another checksum than their writers gave: places in `device_slots`, in order.

        Call it with the stream current that the copy was launched on. Waits for that stream once, without the GIL.
        Nobody may write to these blocks before it returns. The host reads no block.

        :param prefixes: of each block, the bytes that its writer summed before it (`kvtier.codec.checksums.prefix`):
            equally many, which `can_check` takes.
        :param checksums: of each block, xxh3_64 of both, not negative.
        :raises InvalidInputError: as many of each are needed, and prefixes as described.
        """
        if not len(device_slots) == len(prefixes) == len(checksums):
            raise InvalidInputError(
                f"{len(device_slots)} device slots, {len(prefixes)} prefixes and {len(checksums)} checksums: "
                "must be as many"
            )
        if not prefixes:
            return []
        lengths = set(map(len, prefixes))
        if len(lengths) != 1 or not self.can_check(self._parts, prefix_bytes=max(lengths)):
            raise InvalidInputError(
                f"prefixes of {sorted(lengths)} bytes before blocks of {self._block_bytes}: need the same multiple of "
                f"{WORD_BYTES} for all, and {LEAST_BYTES} bytes or more together"
            )
        return _differing(self._checksums(device_slots, b"".join(prefixes)), checksums)

    def wrong(self, rows: Bytes2D, slots: Slots, device_slots: Slots) -> list[int]:
        """Which of the blocks looked at differ: places in `slots`, in order. Empty when all are alike.

        Call it with the stream current that the copy was launched on. Waits until that stream is done, without the GIL,
        and computes the host's checksums meanwhile. Nobody may write to these slots before it returns.

        :param rows: uint8 `[num_slots, at least a block's bytes]` in host memory: where the blocks came from.
        :param slots: rows there. `device_slots`: the blocks on the device that they were copied to, as many.
        """
        sample = self._sample(len(slots))
        if not sample:
            return []
        there = self._checksums([device_slots[place] for place in sample], _ZEROS * len(sample))
        here = []
        for place in sample:
            hasher = xxhash.xxh3_64(_ZEROS)
            hasher.update(rows[slots[place]][: self._block_bytes])
            here.append(hasher.intdigest())
        return [sample[place] for place in _differing(there, here)]

    def _checksums(self, device_slots: Slots, prefixes: bytes) -> torch.Tensor:
        """Returns checksums on the device. There is one upload, of memory that is not pinned: the driver has copied it
        when it returns."""
        ids = np.asarray(device_slots, dtype=np.int64)
        words = np.concatenate([ids, np.frombuffer(prefixes, dtype=np.int64)])
        uploaded = torch.from_numpy(words).to(self._device, non_blocking=True)
        blocks, before = uploaded[: len(ids)], uploaded[len(ids) :].view(len(ids), -1)
        at_a_time = self._most_at_a_time
        batches = [slice(start, start + at_a_time) for start in range(0, len(ids), at_a_time)]
        return torch.cat([block_checksum(self._parts, blocks[batch], before[batch]) for batch in batches])

    def _sample(self, num_blocks: int) -> list[int]:
        """Blocks are chosen by count, not by key: the same block of a prompt is not looked at each time, nor never."""
        if num_blocks == 0:
            return []
        with self._lock:
            before, self._num_loaded = self._num_loaded, self._num_loaded + num_blocks
        return list(range(-before % self._every, num_blocks, self._every)) or [before % num_blocks]


def _differing(there: torch.Tensor, here: Sequence[int]) -> list[int]:
    """Places of checksums that are not the same. Waits for the current stream."""
    found = there.cpu().numpy().view(np.uint64).tolist()
    return [place for place, (one, other) in enumerate(zip(found, here, strict=True)) if one != other]
