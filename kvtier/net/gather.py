"""Many buffers over one blocking socket: pieces for `sendmsg`, and timeouts that the kernel keeps."""

import struct

SEND_SLICE_S = 0.05
"""SO_SNDTIMEO of sockets that send pieces: between two looks at the clock."""
SEND_PIECE_BYTES = 1 << 20
"""A Unix socket counts SO_SNDTIMEO anew for every 80 KiB or so that the peer makes room for. Short slices and
pieces keep a peer that takes a little just in time from stretching one call to many deadlines."""

MAX_VECTORS = 1024
"""IOV_MAX of Linux and macOS."""
_TIMEVAL = struct.Struct("ll")


TCP_PIECE_BYTES = 256 << 10
"""Bytes that are sent at a time over TCP. The kernel copies what was just sent over the loopback while it is in the
processor's cache: a fifth faster."""
TCP_LARGE_PIECE_BYTES = 16 << 20
"""Bytes that are sent at a time over TCP where system calls are to be few. TCP counts SO_SNDTIMEO once for a call."""


def piece(views: list[memoryview], start: int, room: int = SEND_PIECE_BYTES) -> list[memoryview]:
    """What one system call may take: views from `start` on, the last one cut to fit into `room` bytes."""
    taken: list[memoryview] = []
    for view in views[start : start + MAX_VECTORS]:
        taken.append(view[:room])
        room -= len(view)
        if room <= 0:
            break
    return taken


def skip(views: list[memoryview], start: int, count: int) -> int:
    """Returns where to go on after `count` bytes from `start`; the view that they end in is cut in place."""
    while count and count >= len(views[start]):
        count -= len(views[start])
        start += 1
    if count:
        views[start] = views[start][count:]
    return start


def timeval(seconds: float) -> bytes:
    """Packs seconds for SO_RCVTIMEO and SO_SNDTIMEO. Zero means no timeout to the kernel: a rest of a deadline is
    rounded up."""
    microseconds = -int(-seconds * 1e6 // 1)
    return _TIMEVAL.pack(*divmod(microseconds, 1_000_000))
