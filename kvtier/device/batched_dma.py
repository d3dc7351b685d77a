"""Many transfers between a CUDA device and host memory by one call of the driver: `cuMemcpyBatchAsync`.

To ask for transfers one by one takes microseconds of Python for each, and the interpreter's lock every time. The driver
takes half a microsecond for each of a batch, without the lock. Signature and structures are those of CUDA 12.8's
cuda.h; newer drivers have them beside those of their own version.
"""

import ctypes
import logging
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_log = logging.getLogger(__name__)
_LIBRARY = "libcuda.so.1"
_NAME, _VERSION = b"cuMemcpyBatchAsync", 12080
_SOURCE_IN_STREAM_ORDER, _SOURCE_ANY_TIME = 1, 3
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM and _ANY. Targets are always written in the stream's order."""

_FIRST_CALL = 1024
"""Transfers of the first call; each further one has half as many again as the one before. The driver begins to copy
when a call is over, and takes half a microsecond to one for each of its transfers: as long as the bus takes for 32 to
64 KiB. So the device is soon busy, it stays busy while more is asked for, and few calls have to wait for the
interpreter's lock."""
Numbers = npt.NDArray[np.int64]


class _Location(ctypes.Structure):
    """`CUmemLocation`. It is of no account for memory that is on a device, or pinned."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """`CUmemcpyAttributes`."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
PROTOTYPE = ctypes.CFUNCTYPE(
    ctypes.c_int, _POINTER, _POINTER, _POINTER, _SIZE, ctypes.POINTER(_Attributes), ctypes.POINTER(_SIZE), _SIZE,
    ctypes.POINTER(_SIZE), _POINTER,
)  # fmt: skip
"""Targets, sources, sizes, count; attributes, the first transfer of each, their count; which one failed; stream."""


class BatchedDma:
    """What the driver offers, if it does. Any thread in which the device's context is current."""

    def __init__(self, library: Any, address: int) -> None:
        """:param address: of the function, in this library."""
        self._library, self._call = library, PROTOTYPE(address)

    @classmethod
    def of_driver(cls, library: Any = None) -> "BatchedDma | None":
        """None: the driver is older than 12.8, or there is none.

        :param library: what stands for the driver's in tests.
        """
        try:
            library = library or ctypes.CDLL(_LIBRARY)
            find = library.cuGetProcAddress_v2
        except (OSError, AttributeError):
            return None
        address, answer = ctypes.c_void_p(), ctypes.c_int()
        status = find(_NAME, ctypes.byref(address), ctypes.c_int(_VERSION), ctypes.c_uint64(0), ctypes.byref(answer))
        return cls(library, address.value) if status == 0 and address.value else None

    def copy(self, targets: Numbers, sources: Numbers, sizes: Numbers, stream: int, *, from_host: bool) -> None:
        """Queues transfers behind what the stream holds, in no order among themselves. Does not hold the GIL.

        :param targets: addresses, contiguous int64 `[n]`, as `sources` and `sizes` (bytes) are. A transfer stays
            within memory that was registered by one call.
        :param stream: its handle; not the legacy default stream.
        :param from_host: sources are in host memory that no work on the stream writes to: they may be read earlier.
        :raises RuntimeError: the driver refuses.
        """
        order = _SOURCE_ANY_TIME if from_host else _SOURCE_IN_STREAM_ORDER
        attributes, first, failed = _Attributes(order), _SIZE(0), _SIZE(0)
        stop, most = 0, _FIRST_CALL
        while stop < len(targets):
            some = slice(stop, min(stop + most, len(targets)))
            count, stop, most = some.stop - some.start, some.stop, most + most // 2
            status = self._call(
                targets[some].ctypes.data, sources[some].ctypes.data, sizes[some].ctypes.data, count,
                ctypes.byref(attributes), ctypes.byref(first), 1, ctypes.byref(failed), stream,
            )  # fmt: skip
            if status != 0:
                raise RuntimeError(
                    f"cuMemcpyBatchAsync: CUDA error {status} for {count} transfers, at number {failed.value}"
                )

    def works(self, device: torch.device, stream: Any) -> bool:
        """Whether a transfer each way brings what it should. Waits for it. False is logged.

        It is tried with host memory that is pinned and with such that is not: where the system pins nothing, copies are
        slow, and must be right all the same.

        :param stream: of the device, and current.
        """
        return all(self._works_with(device, stream, is_pinned=is_pinned) for is_pinned in (True, False))

    def _works_with(self, device: torch.device, stream: Any, *, is_pinned: bool) -> bool:
        pins = is_pinned and device.type == "cuda"
        source = torch.arange(64, dtype=torch.uint8, pin_memory=pins)
        between, back = torch.zeros_like(source, device=device), torch.zeros(64, dtype=torch.uint8, pin_memory=pins)
        size = np.array([source.nbytes])
        addresses = [np.array([tensor.data_ptr()]) for tensor in (source, between, back)]
        try:
            self.copy(addresses[1], addresses[0], size, stream.cuda_stream, from_host=True)
            self.copy(addresses[2], addresses[1], size, stream.cuda_stream, from_host=False)
            stream.synchronize()
        except RuntimeError as error:
            _log.warning("transfers are asked for one by one: %s", error)
            return False
        if not torch.equal(source, back):
            _log.warning("transfers are asked for one by one: a batch of them did not bring what it should")
            return False
        return True
