"""How long to wait for what may hang: time in which it computes, or waits for a core, does not count."""

from pathlib import Path

from kvtier.clock import MONOTONIC

_POLL_S = 0.1
_TASKS = Path("/proc/self/task")


class Patience:
    """Ends when this process and its children have been blocked for so long, or after some time in all. One thread.

    Where the system does not count how long threads wait for cores (no `/proc/*/schedstat`), all time counts.
    """

    def __init__(self, blocked_s: float, most_s: float, *, may_compute: bool = True) -> None:
        """It begins now.

        :param may_compute: False: time in which they compute counts as well, as for drivers, which may hang in a loop.
        """
        self._most_blocked_s, self._most_s, self._may_compute = blocked_s, most_s, may_compute
        self._blocked_s = 0.0
        self._begun_s = self._looked_s = MONOTONIC()
        self._spent = _spent_s(may_compute)

    def wait_s(self) -> float:
        """Seconds to wait before the next call, a moment at the most. 0: it is over."""
        now, spent = MONOTONIC(), _spent_s(self._may_compute)
        worked = sum(seconds - self._spent.get(thread, 0.0) for thread, seconds in spent.items())
        # A thread's wait for a core is counted when it has one: what seemed blocked until then is taken back.
        self._blocked_s = max(0.0, self._blocked_s + now - self._looked_s - worked)
        self._looked_s, self._spent = now, spent
        left = min(self._most_blocked_s - self._blocked_s, self._begun_s + self._most_s - now)
        return max(0.0, min(_POLL_S, left))

    @property
    def is_blocked(self) -> bool:
        """Whether it is over because nothing was computed, rather than too slowly."""
        return self._blocked_s >= self._most_blocked_s


def _spent_s(with_computing: bool) -> dict[str, float]:
    """Seconds that each thread of this process and its children has waited for a core, or has had one."""
    found: dict[str, float] = {}
    for tasks in (_TASKS, *_tasks_of_children()):
        for task in tasks.glob("*"):
            try:
                ran, waited, _ = (task / "schedstat").read_text().split()
            except (OSError, ValueError):  # it has ended, or the system does not say
                continue
            found[task.name] = (int(waited) + int(ran) * with_computing) / 1e9
    return found


def _tasks_of_children() -> list[Path]:
    found: list[Path] = []
    for file in _TASKS.glob("*/children"):
        try:
            found.extend(Path("/proc", pid, "task") for pid in file.read_text().split())
        except OSError:
            continue
    return found
