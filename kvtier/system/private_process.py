"""Keeps other processes of the same user out of this one."""

import ctypes
import os
import sys

_PR_SET_DUMPABLE = 4


def make_process_private() -> None:
    """Lets other processes of this user no longer attach to this one, nor open its memory and descriptors in /proc.

    A process that opens a descriptor there reads memory that this one shares only with chosen clients, and as the
    owner changes it. Root still may. There are no core dumps either. The process itself opens all of that as
    before, through /proc/self. Linux only; elsewhere nothing happens.

    :raises OSError: the system refuses.
    """
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
