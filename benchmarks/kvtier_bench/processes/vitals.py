"""What the system says of a process: its memory, threads and descriptors."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import KvtierError


@dataclass(frozen=True, slots=True)
class Vitals:
    """A process at one moment. Linux only."""

    peak_rss_bytes: int
    """The largest that it has had since it began."""
    num_threads: int
    num_sockets: int | None
    """Descriptors that are sockets; None where this user may not look, as of a pool beside anybody but root."""

    @classmethod
    def of(cls, pid: int) -> "Vitals":
        """Raises `KvtierError` when the process has ended."""
        fields = dict(line.split(":", 1) for line in _status(pid) if ":" in line)
        if "VmHWM" not in fields:
            raise KvtierError(f"process {pid} has ended")
        return cls(int(fields["VmHWM"].split()[0]) * 1024, int(fields["Threads"]), _num_sockets(pid))


def _status(pid: int) -> Sequence[str]:
    try:
        return Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return ()


def _num_sockets(pid: int) -> int | None:
    try:
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return None
    return sum(_target(descriptor).startswith("socket:") for descriptor in descriptors)


def _target(descriptor: Path) -> str:
    """What a descriptor leads to, empty if it has been closed."""
    try:
        return os.readlink(descriptor)
    except OSError:
        return ""
