"""What goes wrong with the medium: counted, logged quietly, and what it does to the tier as a whole."""

import errno
import logging
import threading

from kvtier.clock import MONOTONIC, Clock
from kvtier.events import EventKind, TierState
from kvtier.metrics import Metrics
from kvtier.system.quiet_log import QuietLog
from kvtier.tiers.base import WriteStatus
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.common.event_queue import EventQueue

_log = logging.getLogger(__name__)
_NO_SPACE_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_PASSING_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR)
"""What has nothing to do with the file. After any other error it cannot be read again: EIO, ENODATA (a bad sector),
EUCLEAN and EBADMSG (a file system that is broken), or something else that lies in its place."""
NOT_ALLOWED_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS)
"""What somebody has to mend, rather than a drive that has lost something."""
_WRITES_IN_A_ROW, _PAUSE_S = 8, 5.0
"""This many failed writes make the tier read-only; after a pause one write tries again."""
_SEGMENTS_IN_A_ROW = 8
"""This many segments of which reads fail, and none in between that works, switch it off: what is left of such a drive
is not worth waiting for. One of them alone is a bad region, or a file that somebody has removed."""
_MEDIUM_ERRNOS = (
    errno.EIO,
    errno.ENODATA,
    errno.EUCLEAN,
    errno.EBADMSG,
    errno.EREMOTEIO,
    errno.ETIMEDOUT,
    errno.ENODEV,
)
"""What a drive or its file system says that fails, rather than one that has something else in a file's place."""
_FAILED_WRITES = f"{_WRITES_IN_A_ROW} writes failed in a row; tried again every {_PAUSE_S:g} s"
_FAILED_READS = f"reads of {_SEGMENTS_IN_A_ROW} segments in a row failed; look after the drive, then restart"


class MediumHealth:
    """Counters, log lines, and what the tier can still do. Any thread. Changes of that are posted, not flushed."""

    def __init__(self, name: str, metrics: Metrics, events: EventQueue, clock: Clock = MONOTONIC) -> None:
        self._name = name
        self._metrics = metrics
        self._events = events
        self._log = logging.LoggerAdapter(_log, {"tier": name})
        self._quiet, self._of_space = QuietLog(self._log, clock=clock), QuietLog(self._log, clock=clock)
        self._writes = CircuitBreaker(_WRITES_IN_A_ROW, _PAUSE_S, clock)
        self._lock = threading.Lock()
        self._failing: set[int] = set()
        """Segments of which a read failed since one last worked. Guarded by _lock."""
        self._lasting = TierState.WRITABLE
        """What failures have made of the tier, whether it hangs or not. Guarded by _lock."""
        self._why = ""
        """What it is in words, while it is not writable. Guarded by _lock."""
        self._hang: str | None = None
        """Why it hangs. Guarded by _lock."""
        self._state = TierState.WRITABLE
        """Changed under _lock, with its event and gauge."""
        metrics.set_state(name, self._state)

    @property
    def state(self) -> TierState:
        """What the medium lets the tier do at this moment."""
        return self._state

    @property
    def problem(self) -> str | None:
        """What keeps the tier from reading or writing, in words; None while nothing does."""
        with self._lock:
            return self._hang or self._why or None

    def hangs(self, reason: str | None) -> None:
        """The medium hangs, and why; None: it answers again. Until then the tier is off."""
        with self._lock:
            self._hang = reason
            changed = self._show()
        if reason is not None:
            self._metrics.io_errors.labels(self._name, "any", "ETIMEDOUT").inc()
            self._log.error("tier %s is off: %s; everything misses until it answers", self._name, reason)
        elif changed:
            self._log.info("tier %s: its medium answers again; it is %s", self._name, self._state.value)

    def may_write(self) -> bool:
        """False while the tier is read-only."""
        return self._writes.allow()

    def wrote(self) -> None:
        """A write has worked."""
        with self._lock:
            back = self._writes.success() and self._change(TierState.WRITABLE, "")
        if back:
            self._log.info("tier %s takes writes again", self._name)

    def write_failed(self, error: OSError) -> WriteStatus:
        """What the writer hears."""
        self.note("write", error)
        with self._lock:
            read_only = self._writes.failure() and self._change(TierState.READ_ONLY, _FAILED_WRITES)
        if read_only:
            self._log.error(
                "tier %s is read-only: %d writes failed in a row, the last one with: %s; tried again every %g s",
                self._name, _WRITES_IN_A_ROW, error, _PAUSE_S,
            )  # fmt: skip
        return WriteStatus.FULL if error.errno in _NO_SPACE_ERRNOS else WriteStatus.FAILED

    def read(self) -> None:
        """A read has worked, whatever it brought."""
        if self._failing:  # unlocked: a stale value costs a lock or a count, nothing else
            with self._lock:
                self._failing.clear()

    def read_failed(self, error: OSError, segment: int) -> bool:
        """True when the tier is to be switched off for it."""
        self.note("read", error)
        if error.errno not in _MEDIUM_ERRNOS:
            return False
        with self._lock:
            self._failing.add(segment)
            off = len(self._failing) >= _SEGMENTS_IN_A_ROW and self._change(TierState.OFF, _FAILED_READS)
        if off:
            self._log.error(
                "tier %s is off: reads of %d segments in a row failed, the last one with: %s; look after the drive, "
                "then restart", self._name, _SEGMENTS_IN_A_ROW, error,
            )  # fmt: skip
        return off

    def corrupt(self, reason: object) -> None:
        """A block that was not what was stored; it is dropped."""
        self._metrics.corrupt_blocks.labels(self._name).inc()
        self._quiet.warning(f"tier {self._name}: dropped a corrupt block: {reason}")

    def note(self, op: str, error: OSError) -> None:
        """Counts and logs what failed."""
        code = errno.errorcode.get(error.errno or 0, "unknown")
        self._metrics.io_errors.labels(self._name, op, code).inc()
        self._quiet.warning(f"tier {self._name}: {op} failed: {error}")

    def warn(self, message: str) -> None:
        self._quiet.warning(f"tier {self._name}: {message}")

    def squeezed(self, most_bytes: int, capacity_bytes: int) -> None:
        """The file system leaves the tier much less than its capacity."""
        self._of_space.warning(
            f"tier {self._name}: others have taken space of its file system: {most_bytes:,} of {capacity_bytes:,} "
            "bytes are left to it, and blocks are evicted earlier"
        )

    def lost_folder(self, error: OSError) -> bool:
        """Nothing of it can be kept any more. True when the tier is to be switched off for it."""
        with self._lock:
            off = self._change(TierState.OFF, f"{error}; give the tier a folder, then restart")
        if off:
            self._log.error("tier %s is off: %s; give it a folder, then restart", self._name, error)
        return off

    def _change(self, state: TierState, why: str) -> bool:
        """Changes the state, so that events come in the order of the changes. False: the tier is off, and stays so.
        Caller holds _lock."""
        if self._lasting is TierState.OFF:
            return False
        self._lasting, self._why = state, why
        self._show()
        return True

    def _show(self) -> bool:
        """Tells of the state if it is another one now, and says whether it is. Caller holds _lock."""
        state = self._lasting if self._hang is None else TierState.OFF
        if state is self._state:
            return False
        self._state = state
        self._metrics.set_state(self._name, state)
        if state is not TierState.WRITABLE:
            self._metrics.degraded.labels(self._name, state.value).inc()
        self._events.post(EventKind(state.value))
        return True


def is_passing(error: OSError) -> bool:
    """Whether the same read may work the next time."""
    return error.errno in _PASSING_ERRNOS
