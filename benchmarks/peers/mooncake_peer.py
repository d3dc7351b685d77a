"""Mooncake Store over TCP on the loopback: a master, a process that lends its memory, and a client in this one.

`python mooncake_peer.py store SEGMENT_BYTES MASTER_PORT` is the process in the middle.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from peer import Blocks, Bytes, free_port, listens, main, only_loopback, server, wait_for

_DEBIAN = Path(sys.prefix, "debian")
"""The folder into which `prepare.py` puts the shared libraries that the system lacks."""
_BUFFER_BYTES = 256 << 20
_ROOM = 8
"""Memory lent, in rounds: a block that was removed may keep its place for a while."""


class MooncakePeer:
    """Mooncake behind the calls that `peer.Peer` describes."""

    def __init__(self, blocks: Blocks, store: "MooncakeDistributedStore", server_pids: Sequence[int]) -> None:
        self._blocks, self._store = blocks, store
        self.pids = server_pids
        self.calls = {"read": ["get_into", "batch_get_into"], "write": ["put", "batch_put_from"]}
        self._keys = [f"block:{slot}" for slot in range(len(blocks.sources))]
        self._sizes = [blocks.payload_bytes] * len(self._keys)
        for block in (*blocks.sources, *blocks.into):
            _require([store.register_buffer(block.ctypes.data, block.nbytes)], [0])

    def prepare(self, op: str, call: str, batch: int) -> None:
        slots = range(len(self._keys))
        there = self._store.batch_is_exist(self._keys)
        if op == "write":
            if any(there):
                _require(self._store.batch_remove(self._keys, force=True), [0] * len(slots))
        elif not all(there):
            self.move("write", "batch_put_from", slots)

    def move(self, op: str, call: str, slots: range) -> None:
        some = slice(slots.start, slots.stop)
        keys, sizes = self._keys[some], self._sizes[some]
        sources, into = self._blocks.sources[some], self._blocks.into[some]
        match call:
            case "get_into":
                results = [self._store.get_into(*one) for one in zip(keys, map(_address, into), sizes, strict=True)]
                _require(results, sizes)
            case "batch_get_into":
                _require(self._store.batch_get_into(keys, list(map(_address, into)), sizes), sizes)
            case "put":
                results = [self._store.put(key, source.data) for key, source in zip(keys, sources, strict=True)]
                _require(results, [0] * len(keys))
            case "batch_put_from":
                results = self._store.batch_put_from(keys, list(map(_address, sources)), sizes)
                _require(results, [0] * len(keys))


def _address(block: Bytes) -> int:
    return int(block.ctypes.data)


def _require(results: Sequence[int], expected: Sequence[int]) -> None:
    if list(results) != list(expected):
        raise RuntimeError(f"answers {sorted(set(results))} where {sorted(set(expected))} were expected")


def connected(segment_bytes: int, master_port: int) -> "MooncakeDistributedStore":
    store = MooncakeDistributedStore()
    address = f"127.0.0.1:{master_port}"
    _require([store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, _BUFFER_BYTES, "tcp", "", address)], [0])
    return store


@contextlib.contextmanager
def start(blocks: Blocks) -> Iterator[MooncakePeer]:
    if not only_loopback():
        print("no network of its own: it may talk to others than the loopback", file=sys.stderr)
    port = free_port()
    segment_bytes = max(_ROOM * blocks.payload_bytes * len(blocks.sources), 256 << 20)
    with contextlib.ExitStack() as stack:
        master = [Path(mooncake.__file__).parent / "mooncake_master", "--rpc_address=127.0.0.1", f"--rpc_port={port}"]
        pids = [stack.enter_context(server([*master, f"--metrics_port={free_port()}"]))]
        wait_for("mooncake_master", lambda: listens(port))
        lender = [sys.executable, __file__, "store", str(segment_bytes), str(port)]
        pids.append(stack.enter_context(server(lender)))
        store = connected(0, port)
        stack.callback(store.close)
        wait_for("the storage process", lambda: store.put("probe", bytes(1)) == 0)
        store.remove("probe", force=True)
        yield MooncakePeer(blocks, store, pids)


def _with_libraries() -> None:
    """Starts over with the libraries that `prepare.py` unpacked: the loader reads its path at start only."""
    folders = [str(folder) for folder in _DEBIAN.glob("**/*-linux-gnu") if folder.is_dir()]
    if folders and os.environ.get("LD_LIBRARY_PATH") != (path := ":".join(folders)):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "LD_LIBRARY_PATH": path})


if __name__ == "__main__":
    os.environ["MC_TCP_BIND_ADDRESS"] = "127.0.0.1"
    _with_libraries()
    import mooncake
    from mooncake.store import MooncakeDistributedStore

    if sys.argv[1] == "store":
        lent = connected(int(sys.argv[2]), int(sys.argv[3]))
        threading.Event().wait()
    else:
        main(start)
