"""What all peers share: the same blocks as ours, rounds on request, servers that end with their peer.

`kvtier bench paths` starts `python NAME_peer.py PAYLOAD_BYTES NUM_SLOTS` with the peer's own Python, `kvtier bench
tiers` names a folder besides. The peer prints `{"pids": [...], "calls": {"read": [...], "write": [...]}}` when it is
ready; then for each line `{"do": "prepare" | "run", "op": ..., "call": ..., "batch": ...}` it prints
`{"calls": [seconds, ...]}`, or `{"error": ...}`. A run moves all blocks once, `batch` of them a call. The end of its
input ends it.
"""

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
START_TIMEOUT_S = 120.0
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG = 1
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1


class Peer(Protocol):
    """One cache, seen through its client."""

    pids: Sequence[int]
    """All processes that take part."""
    calls: dict[str, list[str]]
    """Names of the client's calls that do an op, by op."""

    def prepare(self, op: str, call: str, batch: int) -> None:
        """Gets ready for a round, untimed: all blocks are there for a read, none of them for a write."""

    def move(self, op: str, call: str, slots: range) -> None:
        """Reads or writes these blocks in one call. Raises `RuntimeError` when not all of them are moved."""


class Blocks:
    """Random blocks and memory to read them into, touched before."""

    def __init__(self, payload_bytes: int, num_slots: int) -> None:
        rng = np.random.default_rng(0)
        self.payload_bytes = payload_bytes
        self.all_sources = _memory(payload_bytes * num_slots)
        self.all_into = _memory(payload_bytes * num_slots)
        self.sources = np.split(self.all_sources, num_slots)
        self.into = np.split(self.all_into, num_slots)
        for source in self.sources:
            source[:] = np.frombuffer(rng.bytes(payload_bytes), np.uint8)

    def require_read(self) -> None:
        """Raises unless every block is where it was to be read into."""
        if not all(np.array_equal(into, source) for into, source in zip(self.into, self.sources, strict=True)):
            raise RuntimeError("what was read is not what was written")


def main(start: Callable[[Blocks], AbstractContextManager[Peer]]) -> None:
    """Serves until the end of standard input."""
    # Servers and libraries write to standard output as well: the answers go elsewhere.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(what: dict[str, Any]) -> None:
        print(json.dumps(what), file=answers, flush=True)

    blocks = Blocks(int(sys.argv[1]), int(sys.argv[2]))
    with contextlib.ExitStack() as stack:
        try:
            peer = stack.enter_context(start(blocks))
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})
            raise
        answer({"pids": [os.getpid(), *peer.pids], "calls": peer.calls})
        checked: set[str] = set()
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer(_round(peer, blocks, request, checked))
            except Exception as error:  # told to whoever asked, who decides
                answer({"error": f"{request['call']}: {type(error).__name__}: {error}"})


def _round(peer: Peer, blocks: Blocks, request: dict[str, Any], checked: set[str]) -> dict[str, Any]:
    op, call, batch = request["op"], request["call"], request["batch"]
    if request["do"] == "prepare":
        peer.prepare(op, call, batch)
        return {}
    seconds = []
    for at in range(0, len(blocks.sources), batch):
        start = time.perf_counter()
        peer.move(op, call, range(at, min(at + batch, len(blocks.sources))))
        seconds.append(time.perf_counter() - start)
    if op == "read" and call not in checked:
        blocks.require_read()
        checked.add(call)
    return {"calls": seconds}


@contextlib.contextmanager
def server(command: Sequence[str | Path], *, environ: dict[str, str] | None = None) -> Iterator[int]:
    """A process of a peer's, and its id; ends with this one, however that ends."""

    def die_with_parent() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=2, env={**os.environ, **(environ or {})}, preexec_fn=die_with_parent
    )
    try:
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(what: str, ready: Callable[[], bool]) -> None:
    """Asks again and again, for `START_TIMEOUT_S`."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} was not ready within {START_TIMEOUT_S:.0f} s")
        time.sleep(0.05)


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def only_loopback() -> bool:
    """A network of this process's own, with a loopback and nothing else; False where the system refuses.

    Before any thread or server is started.
    """
    libc = ctypes.CDLL(None)
    if libc.unshare(_CLONE_NEWNET) and libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack("16xh14x", fcntl.ioctl(control, _SIOCGIFFLAGS, request))
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))
    return True


def _memory(nbytes: int) -> Bytes:
    """Page-aligned and touched."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= 1 << 21:
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array[:: mmap.PAGESIZE] = 0
    return array
