"""A network between an engine and a pool that fails as it is told, in a process of its own.

`python -m kvtier_bench.processes.link_process` reads JSON lines: `{"target": [host, port]}` first, which it answers
with `{"address": ...}`, then `{"kind": ..., "delay_s": ..., "flaps": ...}`, which it answers with `{"num_hurt": ...}`.
"""

import json
import sys
import threading
from contextlib import ExitStack
from typing import Any

from kvtier.testing.faulty_link import FaultyLink, LinkFault
from kvtier_bench.processes.json_process import JsonProcess

FLAP_S = 1.0
"""How long a network that flaps is up, and how long it is down."""


class LinkProcess:
    """Such a network in front of one TCP server, started. One thread."""

    def __init__(self, target: str, stack: ExitStack) -> None:
        """
        :param target: HOST:PORT of the server.
        :param stack: ends the process.
        """
        host, _, port = target.rpartition(":")
        self._process = stack.enter_context(JsonProcess(__name__, {"target": [host, int(port)]}))
        self.address: str = self._process.answer()["address"]

    def fail(self, kind: LinkFault | None, *, delay_s: float = 0.0, flaps: bool = False) -> int:
        """Fails in this way from now on, and in no way for None; the number of pieces that faults have met before.

        :param delay_s: of `LATENCY`.
        :param flaps: fails for `FLAP_S` seconds, works for as long, and so on.
        """
        self._process.tell({"kind": kind, "delay_s": delay_s, "flaps": flaps})
        return int(self._process.answer()["num_hurt"])


class _Fault:
    """What the link is told now, and a thread that flaps. Any thread."""

    def __init__(self, link: FaultyLink) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._told: dict[str, Any] = {"kind": None}
        """Guarded by _lock, as is the next one."""
        self._is_down = False
        threading.Thread(target=self._flap, name="kvtier-bench-flaps", daemon=True).start()

    def set(self, told: dict[str, Any]) -> None:
        with self._lock:
            self._told = told
            self._apply(is_down=told["kind"] is not None)

    def _apply(self, *, is_down: bool) -> None:
        self._is_down = is_down
        if is_down:
            self._link.fail(LinkFault(self._told["kind"]), self._told["delay_s"])
        else:
            self._link.heal()

    def _flap(self) -> None:
        pause = threading.Event()
        while not pause.wait(FLAP_S):
            with self._lock:
                if self._told.get("flaps"):
                    self._apply(is_down=not self._is_down)


def _run() -> None:
    host, port = json.loads(sys.stdin.readline())["target"]
    link = FaultyLink((host, port), seed=0)
    fault = _Fault(link)
    with link.running() as address:
        print(json.dumps({"address": address}), flush=True)
        for line in sys.stdin:
            fault.set(json.loads(line))
            print(json.dumps({"num_hurt": link.num_hurt}), flush=True)


if __name__ == "__main__":
    _run()
