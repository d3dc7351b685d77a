"""A second process with engines. Every wait has a bound."""

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from engine_shape import Shape, Storage

_SCRIPT = Path(__file__).with_name("hicache_child.py")
_WAIT_S = 120.0
"""Importing SGLang takes 10 s."""


@dataclass(frozen=True, slots=True)
class Child:
    """One command at a time."""

    _process: "subprocess.Popen[str]"
    _answers: BinaryIO
    _log: Path

    def call(self, name: str, shape: Shape, storage: Storage, **arguments: Any) -> int:
        """Has an engine do it that exists for this only; see `hicache_child`."""
        command = {"call": name, "shape": asdict(shape), "storage": asdict(storage), **arguments}
        assert self._process.stdin is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)
        ready, _, _ = select.select([self._answers], [], [], _WAIT_S)
        line = self._answers.readline() if ready else b""
        assert line, f"no answer within {_WAIT_S:.0f} s: {self._log.read_text(errors='replace')[-3000:]}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return int(answer["answer"])


@contextlib.contextmanager
def child(folder: Path) -> Iterator[Child]:
    """It is gone at the end."""
    read_end, write_end = os.pipe()
    log = folder / "child.log"
    path = os.pathsep.join([str(_SCRIPT.parent), str(_SCRIPT.parents[1] / "rigs"), os.environ.get("PYTHONPATH", "")])
    with os.fdopen(read_end, "rb") as answers, log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(_SCRIPT), str(write_end)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=os.environ | {"PYTHONPATH": path},
            text=True,
            pass_fds=[write_end],
        )
        os.close(write_end)
        try:
            yield Child(process, answers, log)
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(_WAIT_S) == 0, log.read_text(errors="replace")[-3000:]
        finally:
            process.kill()
            process.wait(_WAIT_S)
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
