"""Memory on the NUMA node that a device is attached to. Linux only; elsewhere nothing is done.

A copy to a device of another socket goes through the link between the sockets, which all devices share.
"""

import ctypes
import logging
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

_SYS = Path("/sys")
_MBIND = {"x86_64": 237, "aarch64": 235}
"""The number of mbind(2), which libc has no function for, by machine."""
_MPOL_PREFERRED = 1
"""Pages come from the node while it has any, then from others: it fails no allocation."""
_MASK_BITS = 1024
"""The most nodes that Linux can be built for."""
_log = logging.getLogger(__name__)
_Syscall = Callable[..., int]


def node_of_pci(domain: int, bus: int, device: int, *, sys: Path = _SYS) -> int | None:
    """The node that a PCI device is attached to. None: there is one node only, or nobody knows.

    :param sys: where the kernel tells of it; a seam for tests.
    """
    folder = sys / "bus/pci/devices" / f"{domain:04x}:{bus:02x}:{device:02x}.0"
    try:
        is_one = (sys / "devices/system/node/online").read_text().strip() == "0"
        node = int((folder / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return None if is_one or node < 0 else node


def prefer_node(memory: memoryview, node: int, *, syscall: _Syscall | None = None) -> None:
    """Has pages of this memory that are not touched yet come from this node. A failure is logged, and no more.

    :param memory: whole pages, writable. The choice holds for all processes that map it, if it is shared.
    :param syscall: a seam for tests.
    """
    number = _MBIND.get(platform.machine())
    if number is None or sys.platform != "linux":
        return
    mask = (ctypes.c_ulong * (_MASK_BITS // (8 * ctypes.sizeof(ctypes.c_ulong))))()
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask[node // bits] = 1 << node % bits
    call = syscall or ctypes.CDLL(None, use_errno=True).syscall
    address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    # The kernel takes the number of bits for one more than there are.
    arguments = (ctypes.c_void_p(address), ctypes.c_ulong(len(memory)), ctypes.c_int(_MPOL_PREFERRED))
    if call(ctypes.c_long(number), *arguments, mask, ctypes.c_ulong(_MASK_BITS + 1), ctypes.c_uint(0)):
        code = ctypes.get_errno()
        _log.warning(
            "host memory is not bound to NUMA node %d: %s. Containers may need CAP_SYS_NICE for that", node,
            os.strerror(code),
        )  # fmt: skip
