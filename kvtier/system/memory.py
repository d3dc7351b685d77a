"""How much memory a process here could take."""

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMIT, _CGROUP_USED = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


def available_bytes() -> int | None:
    """Returns what can be taken without swapping, within the limit of this control group; None: Linux does not say."""
    found = [amount for amount in (_of_the_machine(), _of_the_control_group()) if amount is not None]
    return min(found, default=None)


def _of_the_machine() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    available = fields.get("MemAvailable")
    return None if available is None else int(available.split()[0]) * 1024


def _of_the_control_group() -> int | None:
    try:
        limit, used = _CGROUP_LIMIT.read_text().strip(), int(_CGROUP_USED.read_text())
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - used) if limit.isdigit() else None
