"""Other caches, each a process of its own Python, told round by round what to do: see `benchmarks/peers`.

A peer reads a JSON object per line on its standard input and answers with one on its standard output.
"""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import KvtierError
from kvtier_bench.measuring.rounds import Subject

CHECKOUT = Path(__file__).resolve().parents[3]
SCRIPTS = Path("benchmarks", "peers")
PREPARED = "prepared.json"
"""The name of a file in a peer's environment that is written when all of it is there: versions by package."""
_STOP_TIMEOUT_S = 20.0
_ENVIRON = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""What `keep_freed_memory` does for our own processes: no fresh pages for each large value."""


@dataclass(frozen=True, slots=True)
class PeerKind:
    """A peer that `make peers` prepares."""

    name: str
    """The peer's name in reports."""
    folder: str
    """The folder of the peer's environment."""
    floor: str
    """What it is held against."""
    packages: tuple[str, ...]
    """Packages whose versions belong to a figure."""
    apart: frozenset[str] = frozenset()
    """Calls with a row of their own, `NAME-CALL`. The fastest of the others stands for the peer."""
    script: str = ""
    """The name of the peer's script before `_peer.py`, where that is not the folder's."""


KINDS = (
    PeerKind("redis-py", "redis", "raw tcp", ("redis", "hiredis")),
    PeerKind("mooncake-tcp", "mooncake", "raw tcp", ("mooncake-transfer-engine-non-cuda",)),
    PeerKind("lmcache-shm", "lmcache", "memcpy", ("lmcache", "torch"), apart=frozenset({"one-page", "slots"})),
)
DISK_KINDS = (PeerKind("lmcache-disk", "lmcache", "raw disk", ("lmcache", "torch"), script="lmcache_disk"),)
"""The peers that `kvtier bench tiers` runs beside its disk."""


class Peer:
    """A peer that has started. One thread."""

    def __init__(self, kind: PeerKind, process: "subprocess.Popen[str]", log: Path) -> None:
        """Waits until it is ready, however long that takes: its own waits are bounded."""
        self.kind = kind
        self._process, self._log = process, log
        ready = self._answer()
        self.pids: tuple[int, ...] = tuple(ready["pids"])
        self._calls: dict[str, list[str]] = ready["calls"]

    def subjects(self, op: str, batch: int) -> dict[tuple[str, str], Subject]:
        """A subject for each call of the peer's that does `op`, by the row of the report and the name of the call."""
        return {
            (f"{self.kind.name}-{call}" if call in self.kind.apart else self.kind.name, call): self._subject(
                {"op": op, "call": call, "batch": batch}
            )
            for call in self._calls.get(op, [])
        }

    def _subject(self, what: dict[str, Any]) -> Subject:
        def run() -> list[float]:
            return [float(seconds) for seconds in self._ask({"do": "run", **what})["calls"]]

        return Subject(run, prepare=lambda: self._ask({"do": "prepare", **what}), pids=self.pids)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its last words follow
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._last_words()}
        if "error" in answer:
            raise KvtierError(f"{self.kind.name}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"ended: {lines[-1] if lines else 'without a word'}"


def start_peers(
    arguments: Sequence[object],
    *,
    environments: Path,
    logs: Path,
    stack: ExitStack,
    kinds: Sequence[PeerKind] = KINDS,
) -> tuple[list[Peer], list[str]]:
    """The peers that are prepared and run, and a line about each kind. `stack` stops them.

    :param arguments: of their scripts: bytes of a payload, number of blocks, and for disks a folder.
    """
    peers, notes = [], []
    for kind in kinds:
        try:
            peers.append(stack.enter_context(_started(kind, arguments, environments, logs)))
            notes.append(f"{kind.name}: {_versions(kind, environments)}.")
        except (KvtierError, OSError, ValueError) as error:
            notes.append(f"Without {kind.name}: {str(error).removeprefix(f'{kind.name}: ')}.")
    return peers, notes


def _versions(kind: PeerKind, environments: Path) -> str:
    versions = json.loads((environments / kind.folder / PREPARED).read_text())
    return ", ".join(f"{package} {versions.get(package, 'of unknown version')}" for package in kind.packages)


@contextmanager
def _started(kind: PeerKind, arguments: Sequence[object], environments: Path, logs: Path) -> Iterator[Peer]:
    environment, script = environments / kind.folder, CHECKOUT / SCRIPTS / f"{kind.script or kind.folder}_peer.py"
    if not (environment / PREPARED).exists():
        raise KvtierError(f"nothing in {environment}; make peers prepares it")
    if not script.exists():
        raise KvtierError(f"no {script}: peers run from a checkout only")
    log = logs / f"{kind.name}.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [environment / "bin" / "python", script, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd=logs,
            env={**os.environ, **_ENVIRON},
            text=True,
        )
    try:
        yield Peer(kind, process, log)
    finally:
        _stop(process)


def _stop(process: "subprocess.Popen[str]") -> None:
    """The end of its input ends a peer, and what it started."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
