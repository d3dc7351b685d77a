"""The driver's library as `kvtier.device.batched_dma` takes it, for a simulated device."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from kvtier.device.batched_dma import PROTOTYPE
from kvtier_bench.gpu.simulation.cuda import SimulatedCuda

_INVALID_VALUE, _INVALID_CONTEXT = 1, 201
_ANY_TIME = 3
"""CU_MEMCPY_SRC_ACCESS_ORDER_ANY of cuda.h."""
_MOST_PIECES = 3


class SimulatedDriver:
    """It has `cuMemcpyBatchAsync`, which does the transfers of a batch in any order, in a few pieces."""

    def __init__(self, cuda: SimulatedCuda, *, splits: bool, transfer_s: float = 0.0) -> None:
        """
        :param splits: whether a batch is done in several pieces. Its time is the same in one.
        :param transfer_s: the time that the caller spends for each transfer.
        """
        self._cuda, self._splits, self._transfer_s = cuda, splits, transfer_s
        self._callback: Any = PROTOTYPE(self._copy)

    def cuGetProcAddress_v2(self, _name: bytes, address: Any, _version: Any, _flags: Any, _answer: Any) -> int:
        address._obj.value = ctypes.cast(self._callback, ctypes.c_void_p).value
        return 0

    def _copy(
        self, targets: int, sources: int, sizes: int, count: int, attributes: Any, _firsts: Any, _number: int,
        _failed: Any, stream: int,
    ) -> int:  # fmt: skip
        """Queues the transfers. It gives a status, since ctypes would lose an exception."""
        if not self._cuda.has_context:
            return _INVALID_CONTEXT
        if count == 0 or self._cuda.current_stream().cuda_stream != stream:
            return _INVALID_VALUE
        if self._transfer_s:
            self._cuda.timeline.sleep(count * self._transfer_s)
        columns = np.stack([_numbers(address, count) for address in (targets, sources, sizes)])
        reads_any_time = attributes[0].source_access_order == _ANY_TIME
        for piece in self._pieces(columns):
            does = _copies(piece)
            if reads_any_time and self._splits and self._cuda.timeline.random.random() < 0.5:
                does = _copies_of_now(piece)
            target, source, _ = (int(number) for number in piece[:, 0])
            self._cuda.launch_copy(does, source, target, int(piece[2].sum()))
        return 0

    def _pieces(self, columns: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        if not self._splits:
            return [columns]
        with self._cuda.timeline.lock:
            order = np.array(self._cuda.timeline.random.sample(range(columns.shape[1]), columns.shape[1]))
        return [piece for piece in np.array_split(columns[:, order], _MOST_PIECES, axis=1) if piece.shape[1]]


def _numbers(address: int, count: int) -> np.ndarray[Any, Any]:
    """A copy of `count` numbers at the address, which the caller may change as soon as the call has returned."""
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_int64)), (count,)).copy()


def _copies(piece: np.ndarray[Any, Any]) -> Callable[[], None]:
    def does() -> None:
        for target, source, size in piece.T.tolist():
            ctypes.memmove(target, source, size)

    return does


def _copies_of_now(piece: np.ndarray[Any, Any]) -> Callable[[], None]:
    """Transfers whose sources are read at this moment, as a driver may where their order does not matter."""
    read = [(target, ctypes.string_at(source, size)) for target, source, size in piece.T.tolist()]

    def does() -> None:
        for target, data in read:
            ctypes.memmove(target, data, len(data))

    return does
