"""One of many clients of `kvtier bench clients`: reads or writes for some seconds when told to.

`python -m kvtier_bench.processes.client_process` reads JSON lines: first what it is (`ClientSettings` and
`PoolProcess`), then
`{"path": ..., "op": ..., "seconds": ...}`. It answers `{}` when it is prepared, waits for an empty line, and answers
`{"nbytes": ..., "seconds": ...}`.
"""

import contextlib
import json
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from kvtier.errors import KvtierError
from kvtier.memory.malloc import keep_freed_memory
from kvtier_bench.measuring.blocks import Rotation
from kvtier_bench.processes.pool_process import PoolProcess

_STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """What one client moves."""

    label: str
    """A name for the client, which makes its keys its own."""
    payload_bytes: int
    num_slots: int
    batch: int


class ClientProcess:
    """A client, started; a context manager: leaving it ends the process. One thread."""

    def __init__(self, pool: PoolProcess, settings: ClientSettings) -> None:
        command = [sys.executable, "-m", __name__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        self._tell({"pool": asdict(pool), "settings": asdict(settings)})

    def prepare(self, path: str, op: str, seconds: float) -> None:
        """Does not wait: `ready` does."""
        self._tell({"path": path, "op": op, "seconds": seconds})

    def ready(self) -> None:
        self._answer()

    def go(self) -> None:
        """Starts what was prepared. Does not wait: `result` does."""
        self._tell(None)

    def result(self) -> tuple[int, float]:
        """Bytes moved, and the seconds it took."""
        answer = self._answer()
        return int(answer["nbytes"]), float(answer["seconds"])

    def __enter__(self) -> "ClientProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if kind is not None:
            self._process.kill()  # it looks at its input only when it has read or written for its seconds
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _tell(self, what: dict[str, Any] | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(("" if what is None else json.dumps(what)) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise KvtierError("a client process has ended; its reason stands above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _serve() -> None:
    keep_freed_memory()
    first = json.loads(sys.stdin.readline())
    settings, pool = ClientSettings(**first["settings"]), PoolProcess(**first["pool"])
    rotation = Rotation(settings.payload_bytes, settings.num_slots)
    filled = False
    with ExitStack() as stack:
        tiers = pool.tiers(stack)
        for line in sys.stdin:
            request = json.loads(line)
            tier = tiers[request["path"]]
            if request["op"] == "read" and not filled:
                rotation.fill(tier, f"{settings.label}-read")
                filled = True
            make = rotation.reads if request["op"] == "read" else rotation.writes
            subject = make(tier, f"{settings.label}-{request['op']}", settings.batch, ())
            print("{}", flush=True)
            sys.stdin.readline()  # the barrier
            start = time.perf_counter()
            num_rounds = 0
            while (elapsed_s := time.perf_counter() - start) < request["seconds"] or not num_rounds:
                if subject.prepare is not None:
                    subject.prepare()
                subject.run()
                num_rounds += 1
            print(json.dumps({"nbytes": num_rounds * rotation.nbytes, "seconds": elapsed_s}), flush=True)


if __name__ == "__main__":
    _serve()
