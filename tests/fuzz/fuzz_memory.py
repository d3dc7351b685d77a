"""Memory that ends where a page begins which nobody may touch: one byte too far, and the process dies."""

import ctypes
import mmap

_PROT_NONE = 0
_PAGE = mmap.PAGESIZE
_REDZONE = b"\xa5" * 256


class GuardedMemory:
    """Lends buffers that end before a guard page. What native code writes before one is found out by `check`."""

    def __init__(self, most_bytes: int) -> None:
        pages = -(-(most_bytes + len(_REDZONE)) // _PAGE)
        self._end = pages * _PAGE
        self._memory = mmap.mmap(-1, self._end + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(self._memory)
        libc = ctypes.CDLL(None, use_errno=True)
        guard = ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) + self._end
        if libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(_PAGE), _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
        self._lent = 0

    def lend(self, nbytes: int) -> memoryview:
        """The last `nbytes` before the guard; they hold anything. Until it is called again."""
        self._lent = nbytes
        start = self._end - nbytes
        self._view[start - len(_REDZONE) : start] = _REDZONE
        return self._view[start : self._end]

    def holding(self, data: bytes) -> memoryview:
        """A copy of `data` before the guard."""
        view = self.lend(len(data))
        view[:] = data
        return view

    def check(self) -> None:
        """Raises `AssertionError` when something was written before what was lent."""
        start = self._end - self._lent
        assert self._view[start - len(_REDZONE) : start] == _REDZONE, "bytes before the buffer were written"
