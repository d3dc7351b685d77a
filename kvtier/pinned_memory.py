"""Host memory that is pinned for a CUDA device: arenas, and memory of the pool that is mapped for reading."""

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtier.tiers.lending import SlotMemory
from kvtier.transfer import writable_rows

_log = logging.getLogger(__name__)
_HOST_REGISTER_PORTABLE = 1
"""The memory counts as pinned in every CUDA context of this process (CUDA runtime, cudaHostRegisterPortable)."""
_HOST_REGISTER_READ_ONLY = 8
"""The device only reads; memory that this process cannot write is not pinned without it (cudaHostRegisterReadOnly)."""
_REGISTERED, _ALREADY_REGISTERED = 0, 712
"""The second is what CUDA says when another `CudaKV` has pinned the memory, as where a model has several KV groups
(cudaErrorHostMemoryAlreadyRegistered)."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """An arena, or memory that is attached, as copies see it."""

    rows: Tensor
    """uint8 `[num_slots, slot_bytes]`. It does not keep the memory alive."""
    chunk_slots: int
    """Slots per registered chunk: chunks begin at its multiples, and one DMA stays within one of them."""
    is_writable: bool
    status: int
    """What CUDA answered when the memory was to be pinned."""

    @property
    def is_pinned(self) -> bool:
        return self.status in (_REGISTERED, _ALREADY_REGISTERED)


class PinnedMemory:
    """All host memory that one `CudaKV` copies from and to. Any thread."""

    def __init__(self, device: torch.device, cuda: Any, *, on_pinned: Callable[[HostMemory], None]) -> None:
        """
        :param cuda: `torch.cuda`, or what stands for it in tests.
        :param on_pinned: called with memory that has just been pinned, before anything is copied from or to it.
        """
        self._device, self._cuda, self._on_pinned = device, cuda, on_pinned
        self._lock = threading.Lock()
        self._hosts: dict[SlotMemory, HostMemory] = {}  # changed under _lock

    def of(self, memory: SlotMemory) -> HostMemory:
        """The memory as copies see it, pinned if the system lets us."""
        nbytes = memory.rows.nbytes  # raises for an arena that is closed
        # Held while pinning: whoever comes second needs it pinned as well.
        with self._lock:
            if memory not in self._hosts:
                host = self._hosts[memory] = self._pinned(memory)
                if not host.is_pinned:
                    _log.warning(
                        "%d bytes of host memory could not be pinned (CUDA error %d): copies take several times as "
                        "long; raise the limit on locked memory (ulimit -l)", nbytes, host.status,
                    )  # fmt: skip
            return self._hosts[memory]

    def attach(self, memory: SlotMemory) -> bool:
        """Pins memory that is no arena. False: the system does not let us, which is logged."""
        host = self._pinned(memory)  # no lock is held: copies from other memory go on
        if not host.is_pinned:
            _log.warning("shared memory could not be pinned (CUDA error %d)", host.status)
            return False
        with self._lock:
            self._hosts[memory] = host
        return True

    def detach(self, memory: SlotMemory) -> None:
        """Unpins it. No copy from there is under way, and none will come, not even by another `CudaKV`."""
        with self._lock:
            host = self._hosts.pop(memory, None)
        if host is not None:
            self._unpin(host)

    def close(self) -> None:
        """Unpins all that this one pinned. Idempotent."""
        with self._lock:
            hosts, self._hosts = list(self._hosts.values()), {}
        for host in hosts:
            self._unpin(host)

    def _pinned(self, memory: SlotMemory) -> HostMemory:
        """Pins it, if the system lets us. Takes about 0.2 s per GiB."""
        rows, is_writable = torch.from_numpy(writable_rows(memory)), memory.rows.flags.writeable
        flags = _HOST_REGISTER_PORTABLE | (0 if is_writable else _HOST_REGISTER_READ_ONLY)
        # The device is named: a thread that names none sets up another device's memory beside it.
        with self._cuda.device(self._device):
            status = int(self._cuda.cudart().cudaHostRegister(rows.data_ptr(), rows.nbytes, flags))
        host = HostMemory(rows, memory.num_slots, is_writable, status)
        if status != _REGISTERED:
            # CUDA remembers the error for this thread, and torch would raise it after the next kernel it launches.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self._device)
        if host.is_pinned:
            try:
                self._on_pinned(host)
            except BaseException:  # nobody would unpin it, and CUDA would take for pinned whatever is mapped there next
                self._unpin(host)
                raise
        return host

    def _unpin(self, host: HostMemory) -> None:
        if host.status == _REGISTERED:  # or whoever has pinned it unpins it
            with self._cuda.device(self._device):
                self._cuda.cudart().cudaHostUnregister(host.rows.data_ptr())
