"""Keeps a tier process running."""

import logging
import queue
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kvtier.clock import MONOTONIC
from kvtier.errors import ClosedError, ConfigError, KvtierError, UnavailableError
from kvtier.events import EventSink, ignore_event
from kvtier.identity.keys import StoreKey
from kvtier.memory.slab_layout import SharedSlab
from kvtier.metrics import Metrics
from kvtier.protocol.block import Fields
from kvtier.system.logs import Format
from kvtier.tiers.sidecar.child import ChildProcess, SharedMemory
from kvtier.tiers.sidecar.event_relay import EventReceiver
from kvtier.tiers.sidecar.messages import MAX_BLOCKS, Verb, pack_keys
from kvtier.tiers.sidecar.pending_discards import OpeningInventory, PendingDiscards

_MIN_PAUSE_S, _MAX_PAUSE_S = 0.1, 30.0
"""Seconds between the end of a process and the start of the next: doubled every time, until one has lived for a
while."""
_GOOD_LIFE_S = 60.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """What runs in a tier process, and how patient the engine is with it."""

    factory: str
    """`module:function` of a `kvtier.tiers.sidecar.process.MakeTiers`."""
    settings: str
    """The argument of `factory`. It goes over a socket, since it may hold secrets."""
    call_timeout_s: float = 10.0
    """A call that takes longer ends the process. Above the deadlines that its tiers have themselves, or a slow
    neighbour looks like a hung process."""
    start_timeout_s: float = 120.0
    """How long a process may take to open its tiers; a large folder on disk takes seconds."""
    close_timeout_s: float = 20.0
    """How long a process may take to close its tiers; after that, writes that are not over are lost."""
    hidden_environ: Collection[str] = ()
    """Variables of the engine's environment that the process does not inherit: they hold secrets."""
    log_format: Format = "text"
    """What the process logs to standard error is written so."""


class TierProcess:
    """A tier process, started again whenever it ends. Any thread.

    While there is none, and when one dies under a call, calls raise `UnavailableError`: a miss. Deaths are counted
    (`kvtier_io_process_restarts_total`) and logged. What the tiers had told about their content is taken back with a
    CLEARED event, before those of the next process tell theirs. What was to be forgotten meanwhile the next process
    forgets before it tells or serves anything.
    """

    def __init__(
        self,
        shared: SharedMemory,
        settings: ProcessSettings,
        *,
        on_event: EventSink = ignore_event,
        metrics: Metrics,
    ) -> None:
        """Starts the process and waits until its tiers are open. Raises what opening them raises.

        :param shared: the only memory that payloads may be in; stays the caller's, and open until `close`.
        :param on_event: hears of the tiers' content; must not block.
        :param metrics: gains what the tiers count.
        """
        self._settings, self._on_event, self._metrics = settings, on_event, metrics
        self._shared: SharedMemory | None = shared
        """Given up by `close`, when no thread uses it any more."""
        self._lock = threading.Lock()
        self._child: ChildProcess | None = None
        """The process that serves; all that its tiers held at its start has been told. Guarded by _lock."""
        self._opening: ChildProcess | None = None
        """The process that opens its tiers, and does not serve yet. Guarded by _lock."""
        self._owed = PendingDiscards()
        """Keys that the next process is to forget before it serves. Guarded by _lock."""
        self._forgetting = False
        """Whether the process that opens is being told what is owed. Guarded by _lock."""
        self._closing = threading.Event()
        self._closed = False
        """Guarded by _lock."""
        started: queue.SimpleQueue[KvtierError | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(started,), name="kvtier-aside", daemon=True)
        self._thread.start()
        if (error := started.get()) is not None:
            self._thread.join()
            raise error

    @property
    def memory(self) -> memoryview:
        """The memory that payloads may be in."""
        if self._shared is None:
            raise ClosedError("the tier process is closed")
        return self._shared.memory

    @property
    def metrics(self) -> Metrics:
        """The counters of this process's trouble."""
        return self._metrics

    @property
    def pid(self) -> int | None:
        """Id of the process that serves; None while there is none."""
        with self._lock:
            return self._child.pid if self._child is not None else None

    def call(self, verb: Verb, fields: Mapping[str, object], *, uses_memory: bool = False) -> Fields:
        """Returns the answer of the present process. Raises what the tier raised, or `UnavailableError` when no answer
        came. It takes `call_timeout_s` at the most, and as long as a killed process takes to end."""
        child = self._serving()
        return child.call(verb, fields, MONOTONIC() + self._settings.call_timeout_s, uses_memory=uses_memory)

    def fetch_slab(self, serial: int) -> SharedSlab | None:
        """A slab that blocks are lent from; the caller closes its descriptor. None: not to be had now. Raises as
        `call`."""
        return self._serving().fetch_slab(serial, MONOTONIC() + self._settings.call_timeout_s)

    def discard(self, tier: str, keys: Sequence[StoreKey]) -> int:
        """The number that were there of at most `MAX_BLOCKS` keys, which are forgotten now.

        `UnavailableError`: no process has answered, and they will be forgotten before another one serves.
        """
        fields = {"tier": tier, "keys": pack_keys(keys)}
        while True:
            with self._lock:
                child = self._child
                if child is None and not self._closing.is_set():
                    self._owed.add(tier, keys)
            if child is None:
                return self.call(Verb.DISCARD, fields).number("num_discarded")  # or rather raises
            try:
                deadline = MONOTONIC() + self._settings.call_timeout_s
                return child.call(Verb.DISCARD, fields, deadline).number("num_discarded")
            except UnavailableError:
                with self._lock:
                    if self._child in (child, None):
                        self._owed.add(tier, keys)
                        raise
                # Another process serves already, which knows nothing of this.

    def forget_untold(self, tier: str, prefix: bytes) -> None:
        """Has blocks of `tier` forgotten that events could not tell of, because there is no process: those whose keys
        begin with `prefix`. Nothing to do when one serves. Does not block."""
        with self._lock:
            if self._child is None:
                self._owed.add_prefix(tier, prefix)

    def close(self) -> None:
        """Closes the tiers and ends the process. Call it after the last call. Idempotent.

        One that opens its tiers yet has nothing to write, and is killed: at once, or after the time that closing may
        take when there is something that it should forget.
        """
        with self._lock:
            first, self._closed = not self._closed, True
            self._closing.set()
            child, opening = self._child, self._opening
            is_owed = bool(self._owed) or self._forgetting
        if first and child is not None:
            child.close(self._settings.close_timeout_s)
        elif opening is not None:
            if is_owed:
                self._thread.join(self._settings.close_timeout_s)
            opening.kill()
        self._thread.join()
        self._shared = None
        if first and self._owed:
            _log.warning("there was no tier process to forget all that it should; the next engine may find it")

    def _serving(self) -> ChildProcess:
        """`UnavailableError`: there is none."""
        with self._lock:
            child = self._child
        if child is None:
            if self._closing.is_set():
                raise ClosedError("the tier process is closed")
            raise UnavailableError("no tier process at the moment; one is being started")
        return child

    def _run(self, started: "queue.SimpleQueue[KvtierError | None]") -> None:
        """Starts processes and sees them end; a process dies with the thread that started it."""
        try:
            child = self._start()
        except (OSError, KvtierError) as error:
            remedy = "set cache.io_process = false"
            started.put(error if isinstance(error, KvtierError) else ConfigError(f"no tier process: {error}; {remedy}"))
            return
        started.put(None)
        pause_s = _MIN_PAUSE_S
        while True:
            began = MONOTONIC()
            status = child.wait()
            with self._lock:
                self._child = None
            child.end_news()  # not before: a listener that hears of it finds no process
            if self._closing.is_set():
                return
            self._metrics.io_process_restarts.inc()
            pause_s = _MIN_PAUSE_S if MONOTONIC() - began > _GOOD_LIFE_S else min(2 * pause_s, _MAX_PAUSE_S)
            _log.error(
                "tier process %d ended with status %d; its tiers miss until another has started", child.pid, status
            )
            replaced = self._replacement(pause_s)
            if replaced is None:
                return
            child = replaced

    def _replacement(self, pause_s: float) -> ChildProcess | None:
        """The next process, sooner or later; None when it is not wanted any more."""
        while not self._closing.wait(pause_s):
            try:
                return self._start()
            except (OSError, KvtierError) as error:
                if self._closing.is_set():
                    break
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
                _log.error("no tier process, next try in %.1f s: %s", pause_s, str(error))
        return None

    def _start(self) -> ChildProcess:
        assert self._shared is not None
        settings = self._settings
        inventory = OpeningInventory(self._on_event)
        child = ChildProcess(EventReceiver(inventory.on_event, self._metrics), settings.hidden_environ)
        try:
            with self._lock:
                if self._closing.is_set():
                    raise ClosedError("the tier process is closed")
                self._opening = child
            child.open(self._shared, settings.factory, settings.settings, settings.start_timeout_s, settings.log_format)
            self._let_serve(child, inventory)
        except BaseException:
            child.kill()
            child.wait()
            child.end_news()
            raise
        finally:
            with self._lock:
                self._opening, self._forgetting = None, False
        if self._closing.is_set():
            child.kill()  # it has nothing to write yet
        return child

    def _let_serve(self, child: ChildProcess, inventory: OpeningInventory) -> None:
        """Once nothing is owed any more and what its tiers hold is known."""
        while True:
            with self._lock:
                if inventory.told and not self._owed:
                    inventory.end()
                    self._child = child
                    return
                owed, self._owed = self._owed, PendingDiscards()
                self._forgetting = bool(owed)
            try:
                self._forget(child, owed.of(inventory.keys))
            except BaseException:
                with self._lock:
                    self._owed.merge(owed)
                raise
            inventory.tell()

    def _forget(self, child: ChildProcess, owed: Mapping[str, Sequence[StoreKey]]) -> None:
        deadline = MONOTONIC() + self._settings.start_timeout_s  # many files, maybe
        for tier, keys in owed.items():
            for start in range(0, len(keys), MAX_BLOCKS):
                batch = pack_keys(keys[start : start + MAX_BLOCKS])
                child.call(Verb.DISCARD, {"tier": tier, "keys": batch}, deadline)
