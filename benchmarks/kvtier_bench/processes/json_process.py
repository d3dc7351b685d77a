"""A process of a benchmark that is told JSON lines and answers them."""

import contextlib
import json
import subprocess
import sys
from types import TracebackType
from typing import Any

from kvtier.errors import KvtierError

_STOP_TIMEOUT_S = 20.0


class JsonProcess:
    """`python -m MODULE`, started; a context manager: leaving it ends the process. One thread."""

    def __init__(self, module: str, first: dict[str, Any]) -> None:
        """:param first: what it is told at once."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid
        self.tell(first)

    def tell(self, what: dict[str, Any] | None) -> None:
        """Sends a line, an empty one for None. Does not wait for an answer. `BrokenPipeError`: it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(("" if what is None else json.dumps(what)) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Waits for its next line. Raises `KvtierError` when it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise KvtierError("a client process has ended; its reason stands above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> "JsonProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if kind is not None:
            self._process.kill()  # it looks at its input only when it has done what it was told
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
