"""How much memory a process here could take."""

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMIT, _CGROUP_USED = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


def available_bytes() -> int | None:
    """Returns what can be taken without swapping, within the limit of this control group; None: Linux does not say."""
    found = [amount for amount in (_meminfo("MemAvailable"), _of_the_control_group()) if amount is not None]
    return min(found, default=None)


def total_bytes() -> int | None:
    """Returns what all processes of this machine, or of this control group, have together; None: Linux does not say."""
    found = [amount for amount in (_meminfo("MemTotal"), _limit()) if amount is not None]
    return min(found, default=None)


def _meminfo(name: str) -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    amount = fields.get(name)
    return None if amount is None else int(amount.split()[0]) * 1024


def _limit() -> int | None:
    try:
        text = _CGROUP_LIMIT.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _of_the_control_group() -> int | None:
    limit = _limit()
    try:
        used = int(_CGROUP_USED.read_text())
    except (OSError, ValueError):
        return None
    return None if limit is None else max(0, limit - used)
