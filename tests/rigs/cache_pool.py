"""A cache pool in a process of its own, for the tests of real engines. Every wait has a bound."""

import hashlib
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from kvtier.system.processes import Service
from suspending import resume, suspend

WAIT_S = 120.0
"""Bound on everything that is waited for; never reached when the code works."""
TOKENS = {"red": "red-token-for-tests", "blue": "blue-token-for-tests"}
"""Tokens of tenants, for the pool."""


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.05)


class CachePool:
    """`kvtier pool serve`. A context manager: leaving it kills the pool."""

    def __init__(self, folder: Path, tokens: Mapping[str, str], **environ: str) -> None:
        """:param environ: settings of the pool, such as `KVTIER__TRACING__ENDPOINT`."""
        digests = {name: hashlib.sha256(token.encode()).hexdigest() for name, token in tokens.items()}
        self.address = f"unix:{folder}/pool.sock"
        self._environ = environ
        self._folder, self._tenants = folder, [f"--tenant={name}={digest}" for name, digest in digests.items()]

    def __enter__(self) -> "CachePool":
        listen = [f"--listen={self.address}", "--listen=127.0.0.1:0", "--grpc-listen=127.0.0.1:0"]
        arguments = ["pool", "serve", *listen, "--http-listen=127.0.0.1:0", "--memory-bytes=512MiB", *self._tenants]
        self._service = Service(arguments, log=self._folder / "pool.log", environ=self._environ)
        ready = self._service.ready()
        self._http = ready["http"]
        _, self.tcp = ready["block"].split(",")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """SIGKILL; waits."""
        self._service.kill()

    def restart(self) -> None:
        """SIGKILL, and an empty one at the same address."""
        self.kill()
        self.__enter__()

    def suspend(self) -> None:
        """SIGSTOP: connections stay, and nobody answers from now on."""
        suspend(self._service.process.pid)

    def resume(self) -> None:
        resume(self._service.process.pid)

    def num_written(self) -> int:
        """Blocks that engines have stored here."""
        return self._count("kvtier_pool_written_blocks_total", 'status="stored"')

    def num_pinned(self) -> int:
        """Blocks that stay in memory because somebody wants it."""
        return self._count("kvtier_pool_pinned_blocks", "")

    def num_read(self) -> int:
        """Blocks that engines have got from here."""
        return self._count("kvtier_pool_read_blocks_total", 'source="memory"')

    def await_written(self, num_blocks: int) -> None:
        until(lambda: self.num_written() >= num_blocks, f"{num_blocks} blocks were stored")

    def _count(self, name: str, label: str) -> int:
        with urllib.request.urlopen(f"http://{self._http}/metrics", timeout=WAIT_S) as response:
            lines = response.read().decode().splitlines()
        samples = [line for line in lines if line.startswith((f"{name}{{", f"{name} ")) and label in line]
        return int(sum(float(line.rpartition(" ")[2]) for line in samples))
