"""Host memory that is pinned for a CUDA device: arenas, and memory of the pool that is mapped for reading."""

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtier.clock import MONOTONIC
from kvtier.device.kv import writable_rows
from kvtier.memory import memfd
from kvtier.memory.numa import node_of_pci
from kvtier.memory.pages import PAGE_BYTES
from kvtier.memory.slot_memory import SlotMemory

_log = logging.getLogger(__name__)
_CHUNK_BYTES = 1 << 30
"""Memory that is registered by one call. NVIDIA's driver refuses 512 GiB at once from R580 on, and 2 GiB on Linux 6.11
to 6.13; and while it works, calls to CUDA wait for it in this process and in others."""
_PAUSE_S = 0.001
"""The pause between two chunks, for calls to CUDA that wait."""
_HOST_REGISTER_PORTABLE = 1
"""The memory counts as pinned in every CUDA context of this process (CUDA runtime, cudaHostRegisterPortable)."""
_HOST_REGISTER_READ_ONLY = 8
"""The device only reads; memory that this process cannot write is not pinned without it (cudaHostRegisterReadOnly)."""
_REGISTERED = 0


@dataclass(frozen=True, slots=True)
class HostMemory:
    """An arena, or lent memory, as copies see it."""

    rows: Tensor
    """uint8 `[num_slots, slot_bytes]`. It does not keep the memory alive."""
    chunk_slots: int
    """Slots per registered chunk: chunks begin at its multiples, and one DMA stays within one of them."""
    is_writable: bool
    is_pinned: bool
    """Whether the whole memory is pinned. Otherwise nothing of it is."""
    chunks: tuple[tuple[int, int], ...]
    """Address and bytes of what is registered, piece by piece."""


class PinnedMemory:
    """The host memory that one `CudaKV` copies from and to. Any thread."""

    def __init__(self, device: torch.device, cuda: Any, *, on_pinned: Callable[[HostMemory], None]) -> None:
        """
        :param cuda: `torch.cuda`, or what stands for it in tests.
        :param on_pinned: called with memory that has just been pinned, before anything is copied from or to it.
        """
        self._device, self._cuda, self._on_pinned = device, cuda, on_pinned
        self._pinning = threading.Lock()
        """Held while memory is being pinned. No copy waits for it but from and to memory that was not attached."""
        self._lock = threading.Lock()
        self._hosts: dict[SlotMemory, HostMemory] = {}  # guarded by _lock
        self._pinning_s = 0.0  # guarded by _pinning

    @property
    def pinned_bytes(self) -> int:
        """The number of bytes that are pinned of everything attached at the moment."""
        with self._lock:
            return sum(nbytes for host in self._hosts.values() for _, nbytes in host.chunks)

    @property
    def pinning_s(self) -> float:
        """Seconds that pinning has taken since the start."""
        return self._pinning_s

    def of(self, memory: SlotMemory) -> HostMemory:
        """The memory as copies see it. What nobody has attached is attached now, for which the copy waits."""
        nbytes = memory.rows.nbytes  # raises for an arena that is closed
        with self._lock:
            host = self._hosts.get(memory)
        if host is None:
            _log.debug("%d bytes of host memory are pinned by their first copy", nbytes)
            self.attach(memory)
            with self._lock:
                host = self._hosts[memory]
        return host

    def attach(self, memory: SlotMemory) -> bool:
        """Pins memory, about 0.2 s per GiB and more beside other processes that pin; copies from and to other memory
        go on. False: the system does not let us, which is logged; copies from and to it are slow.
        """
        with self._pinning:
            with self._lock:
                host = self._hosts.get(memory)
            if host is None:
                host = self._pinned(memory)
                with self._lock:
                    self._hosts[memory] = host
        return host.is_pinned

    def detach(self, memory: SlotMemory) -> None:
        """Unpins it. No copy from or to it is under way, and none will come."""
        with self._lock:
            host = self._hosts.pop(memory, None)
        if host is not None:
            self._unpin(host.chunks)

    def close(self) -> None:
        """Unpins all. Idempotent."""
        with self._lock:
            hosts, self._hosts = list(self._hosts.values()), {}
        for host in hosts:
            self._unpin(host.chunks)

    def _pinned(self, memory: SlotMemory) -> HostMemory:
        """Pins all of it, or nothing if the system does not let us. Caller holds _pinning."""
        rows, is_writable = torch.from_numpy(writable_rows(memory)), memory.rows.flags.writeable
        chunk_slots, begun_s = _chunk_slots(memory.slot_bytes), MONOTONIC()
        starts = range(0, rows.size(0), chunk_slots)
        chunks, error = self._register([rows[start : start + chunk_slots] for start in starts], is_writable)
        seconds = MONOTONIC() - begun_s
        self._pinning_s += seconds
        host = HostMemory(rows, chunk_slots, is_writable, not error, tuple(chunks))
        if error:
            self._unpin(chunks)
            _log.warning(
                "%d bytes of host memory cannot be pinned: CUDA error %s. Copies take several times as long. Make the "
                "memory smaller (host.capacity_bytes, pool.pinned_bytes), or see what NVIDIA's driver says in the "
                "kernel's log (dmesg)", rows.nbytes, error,
            )  # fmt: skip
            return HostMemory(rows, chunk_slots, is_writable, is_pinned=False, chunks=())
        _log.log(
            logging.INFO if is_writable else logging.DEBUG,  # the pool's memory is many slabs
            "pinned %.2f GiB of host memory in %.2f s", rows.nbytes / 2**30, seconds,
        )  # fmt: skip
        try:
            self._on_pinned(host)
        except BaseException:  # nobody would unpin it, and CUDA would take for pinned whatever is mapped there next
            self._unpin(chunks)
            raise
        return host

    def _register(self, parts: Sequence[Tensor], is_writable: bool) -> tuple[list[tuple[int, int]], str]:
        """The address and size of each part that was pinned here, and the error that ended it, if any."""
        flags = _HOST_REGISTER_PORTABLE | (0 if is_writable else _HOST_REGISTER_READ_ONLY)
        chunks: list[tuple[int, int]] = []
        error = ""
        # The device is named: a thread that names none sets up another device's memory beside it.
        with self._cuda.device(self._device):
            cudart = self._cuda.cudart()
            for number, part in enumerate(parts):
                if number:
                    time.sleep(_PAUSE_S)
                status = cudart.cudaHostRegister(part.data_ptr(), part.nbytes, flags)
                if int(status) != _REGISTERED:
                    error = f"{int(status)} ({cudart.cudaGetErrorString(status)}) at chunk {number + 1} of {len(parts)}"
                    break
                chunks.append((part.data_ptr(), part.nbytes))
        if error:
            # CUDA remembers the error for this thread, and torch would raise it after the next kernel it launches.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self._device)
        return chunks, error

    def _unpin(self, chunks: Iterable[tuple[int, int]]) -> None:
        with self._cuda.device(self._device):
            for address, _ in chunks:
                self._cuda.cudart().cudaHostUnregister(address)


def pins_read_only(device: torch.device, cuda: Any = torch.cuda) -> bool:
    """Whether memory that this process may only read can be pinned for the device: a page is tried.

    Copies from a pool's memory need it on CUDA. The driver says whether it can (the attribute
    cudaDevAttrHostRegisterReadOnlySupported), and for many discrete GPUs it cannot. True for other devices, which pin
    nothing.

    :param cuda: `torch.cuda`, or what stands for it in tests.
    """
    if device.type != "cuda" and cuda is torch.cuda:
        return True
    descriptor = memfd.create("kvtier-probe", PAGE_BYTES)
    try:
        page = np.frombuffer(memfd.map_descriptor(descriptor, PAGE_BYTES, writable=False), dtype=np.uint8)
    finally:
        os.close(descriptor)
    flags = _HOST_REGISTER_PORTABLE | _HOST_REGISTER_READ_ONLY
    with cuda.device(device):
        status = int(cuda.cudart().cudaHostRegister(page.ctypes.data, PAGE_BYTES, flags))
        if status == _REGISTERED:
            cuda.cudart().cudaHostUnregister(page.ctypes.data)
            return True
        with contextlib.suppress(RuntimeError):  # CUDA remembers the error for this thread
            torch.zeros(1, device=device)
    _log.info("blocks of a pool come by way of host memory: the GPU cannot read them in place (CUDA error %d)", status)
    return False


def near_node(device: torch.device, cuda: Any = torch.cuda) -> int | None:
    """The NUMA node that a CUDA device is attached to; None for other devices, and where it makes no difference.

    :param cuda: what knows the device's properties; a seam for tests.
    """
    if device.type != "cuda":
        return None
    properties = cuda.get_device_properties(device)
    return node_of_pci(properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)


def _chunk_slots(slot_bytes: int) -> int:
    """Returns the slots of a chunk: about `_CHUNK_BYTES`, and whole pages, which no two chunks may share."""
    unit = PAGE_BYTES // math.gcd(PAGE_BYTES, slot_bytes)
    return max(unit, _CHUNK_BYTES // slot_bytes // unit * unit)
