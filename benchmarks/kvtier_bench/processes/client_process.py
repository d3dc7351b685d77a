"""One of many clients of `kvtier bench clients`: reads or writes for some seconds when told to.

`python -m kvtier_bench.processes.client_process` reads JSON lines: first what it is (`ClientSettings` and
`PoolProcess`), then
`{"path": ..., "op": ..., "seconds": ...}`. It answers `{}` when it is prepared, waits for an empty line, and answers
`{"nbytes": ..., "seconds": ...}`.
"""

import json
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from types import TracebackType

from kvtier.memory.malloc import keep_freed_memory
from kvtier_bench.measuring.blocks import Rotation
from kvtier_bench.processes.json_process import JsonProcess
from kvtier_bench.processes.pool_process import PoolProcess


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
        self._process = JsonProcess(__name__, {"pool": asdict(pool), "settings": asdict(settings)})
        self.pid = self._process.pid

    def prepare(self, path: str, op: str, seconds: float) -> None:
        """Does not wait: `ready` does."""
        self._process.tell({"path": path, "op": op, "seconds": seconds})

    def ready(self) -> None:
        self._process.answer()

    def go(self) -> None:
        """Starts what was prepared. Does not wait: `result` does."""
        self._process.tell(None)

    def result(self) -> tuple[int, float]:
        """Bytes moved, and the seconds it took."""
        answer = self._process.answer()
        return int(answer["nbytes"]), float(answer["seconds"])

    def __enter__(self) -> "ClientProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.__exit__(kind, error, trace)


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
