"""A process with a vLLM engine in it, which is told one command after the other. Every wait has a bound."""

import contextlib
import json
import os
import select
import subprocess
import time
from pathlib import Path
from typing import Any

from cache_pool import WAIT_S

STOP_S = 60.0


class EngineError(AssertionError):
    """The engine answered with an error, or has ended."""


class Child:
    """A running `engine_child.py`. One command at a time."""

    def __init__(self, process: "subprocess.Popen[str]", answers: int, log: Path, stack: contextlib.ExitStack) -> None:
        """
        :param answers: the descriptor to read them from.
        :param stack: what kills the process, and closes that.
        """
        self._process, self._answers, self._log, self._stack = process, answers, log, stack
        self._received = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, name: str, **arguments: Any) -> Any:
        """Raises `EngineError`."""
        self.send(name, **arguments)
        return self.answer()

    def send(self, name: str, **arguments: Any) -> None:
        """Does not wait for the answer."""
        assert self._process.stdin is not None
        print(json.dumps({"call": name, **arguments}), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        """The next one. Raises `EngineError`."""
        deadline = time.monotonic() + WAIT_S
        while b"\n" not in self._received:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise EngineError(f"no answer within {WAIT_S:.0f} s; {tail_of(self._log)}")
            received = os.read(self._answers, 1 << 16)
            if not received:
                raise EngineError(f"the engine has ended; {tail_of(self._log)}")
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise EngineError(answer["error"])
        return answer

    def output(self) -> bytes:
        """What it has printed so far."""
        return self._log.read_bytes()

    def end(self) -> None:
        """In good order, without an engine."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            code = self._process.wait(STOP_S)
            assert code == 0, f"exit code {code}; {tail_of(self._log)}"
        finally:
            self.kill()

    def kill(self) -> None:
        """The process and all that it has started are gone at the end."""
        self._stack.close()


def tail_of(log: Path) -> str:
    return f"{log}: ...{log.read_text(errors='replace')[-3000:]}"
