"""vLLM engines as processes of their own, which idle between the questions that they are asked."""

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import KvtierError
from kvtier_bench.measuring.workloads import Round

_CHILD = "kvtier_bench.vllm.engine_child"
_PATIENCE_S = 600.0
"""Bound on every answer; the longest wait is for an engine's start beside many others."""
_STOP_TIMEOUT_S = 60.0
_RAISED = re.compile(r"^\w+(?:Error|Exception): .+$", re.MULTILINE)
"""How a traceback ends."""
_ENVIRON = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler and worker in one process, as the figures say
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",  # LMCache's keys depend on it
    "LMCACHE_TRACK_USAGE": "false",
}


@dataclass(frozen=True, slots=True)
class Launch:
    """How an engine is started."""

    options: Mapping[str, Any]
    """Arguments of vLLM's `LLM`."""
    kv_gib: int
    """Device memory for KV."""
    threads: int
    """The threads that the model computes with; 0: one per core."""
    packages: Sequence[Path] = ()
    """Folders whose packages it finds beside its own."""
    environ: Mapping[str, str] | None = None


class EngineProcess:
    """A started engine. One command at a time, of one thread."""

    def __init__(self, name: str, process: "subprocess.Popen[str]", answers: int, log: Path) -> None:
        """Does not wait: `ready` does.

        :param answers: the descriptor to read them from; the caller's.
        """
        self.name = name
        self.vocabulary = 0
        """Number of token ids; known when it is ready."""
        self._process, self._answers, self._log = process, answers, log
        self._received = b""
        self._has_failed = False
        """Whether the engine has said that it failed, or does not speak any more."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self) -> None:
        """Waits until the engine has started. Raises `KvtierError` with the engine's own words if it does not."""
        self.vocabulary = int(self._answer()["vocabulary"])

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, params: Mapping[str, Any] | None = None
    ) -> tuple[float, int]:
        """Seconds until all were answered, and the number of tokens in the answers."""
        answer = self._call("generate", prompts=prompts, max_tokens=max_tokens, params=params)
        return float(answer["seconds"]), int(answer["num_tokens"])

    def serve(self, work: str, seed: int) -> Round:
        """Serves one round of `measuring.workloads` from an empty prefix cache."""
        return Round(**self._call("serve", work=work, seed=seed))

    def branch(self, prompt: Sequence[int], *, num_branches: int, max_tokens: int, seed: int) -> Mapping[str, float]:
        """Draws so many answers to one prompt from an empty prefix cache: `seconds`, `ttft_s`, `most_blocks`,
        `num_computed`."""
        answer: Mapping[str, float] = self._call(
            "branch", prompt=prompt, num_branches=num_branches, max_tokens=max_tokens, seed=seed
        )
        return answer

    def settle(self) -> None:
        """Returns when nothing is being saved any more."""
        self._call("settle")

    def reset(self, *, connector: bool) -> None:
        """Empties vLLM's prefix cache, and with `connector` what that holds in memory."""
        if not self._call("reset", connector=connector):
            raise KvtierError(f"{self.name}: vLLM did not empty its prefix cache: blocks are in use without requests")

    def counters(self) -> dict[str, float]:
        return {str(name): float(value) for name, value in self._call("counters").items()}

    def stop(self) -> None:
        """Ends in good order: what was saved is stored. Nothing when the engine has failed before."""
        if self._has_failed:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.wait(_STOP_TIMEOUT_S) != 0:
            raise KvtierError(f"{self.name}: the engine ended badly; {self._last_words()}")

    def require_clean_start(self) -> None:
        """Raises `KvtierError` when the log has an exception: some connectors go on without what has failed."""
        raised = _RAISED.findall(self._log.read_text(errors="replace"))
        if raised:
            raise KvtierError(f"{self.name}: {raised[-1].rstrip('.')}")

    def _call(self, name: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its last words follow
            print(json.dumps({"call": name, **arguments}), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        line = self._line()
        answer = json.loads(line) if line is not None else {"error": f"no answer; {self._last_words()}"}
        if isinstance(answer, dict) and "error" in answer:
            self._has_failed = True
            raise KvtierError(f"{self.name}: {answer['error']}")
        return answer

    def _line(self) -> bytes | None:
        """The next one; None: it has not come in time, or will not come."""
        deadline = time.monotonic() + _PATIENCE_S
        while b"\n" not in self._received:
            readable, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            received = os.read(self._answers, 1 << 16) if readable else b""
            if not received:
                return None
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _last_words(self) -> str:
        return f"its log ends with:\n{self._log.read_text(errors='replace')[-2000:]}"


@contextmanager
def engine_process(name: str, launch: Launch, folder: Path) -> Iterator[EngineProcess]:
    """An engine that is being started. Leaving the context ends it, in good order unless something has failed.

    :param folder: for its log, and its home: what vLLM remembers there is of no use to others.
    """
    settings = {"options": dict(launch.options), "packages": [str(path) for path in launch.packages]}
    environ = _ENVIRON | {"HOME": str(folder), "VLLM_CPU_KVCACHE_SPACE": str(launch.kv_gib)}
    if launch.threads:
        environ["OMP_NUM_THREADS"] = str(launch.threads)
    log = folder / f"{name.replace(' ', '-')}.log"
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb"), log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", _CHILD, json.dumps(settings), str(write_end)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**os.environ, **environ, **(launch.environ or {})},
            text=True,
            pass_fds=[write_end],
        )
        os.close(write_end)
        engine = EngineProcess(name, process, read_end, log)
        try:
            yield engine
            engine.stop()
        finally:
            process.kill()
            process.wait()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
