"""Copies of chunks between vLLM's primary tier and the pool, in threads: jobs of many chunks, batch by batch."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from kvtier.clock import MONOTONIC, Clock
from kvtier.codec.checksums import checksum
from kvtier.identity.keys import StoreKey
from kvtier.system.started_threads import started_threads
from kvtier.tiers.base import Status, Tier, WriteStatus

_log = logging.getLogger(__name__)
_PRESENT = (Status.HIT, Status.PENDING)
_THERE = (WriteStatus.STORED, WriteStatus.EXISTS)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much may be under way, and for how long."""

    batch_chunks: int
    """Chunks in one call to the tier."""
    load_threads: int
    load_deadline_s: float
    """Seconds after which a load takes no further batch. What it has by then counts."""
    max_saving_chunks: int
    """Chunks of the primary tier that stores pin until they end. A store beyond is dropped, unless it is alone."""


@dataclass(frozen=True, slots=True)
class Job:
    """Chunks to move. `rows[i]` is where `keys[i]` lies in the primary tier."""

    job_id: int
    request_id: str
    keys: Sequence[bytes]
    rows: Sequence[memoryview]
    is_load: bool
    deadline: float = float("inf")


@dataclass(slots=True)
class Outcome:
    """What came of a job. Written by its thread, and read when that is done with it."""

    job: Job
    moved: list[bytes] = field(default_factory=list)
    """Keys whose chunks were loaded and verified, or are in the pool now."""
    seconds: float = 0.0

    @property
    def is_whole(self) -> bool:
        return len(self.moved) == len(self.job.keys)


class Transfers:
    """Jobs by their number. Scheduler thread only; nothing but `drain` and `close` blocks.

    A chunk's row is touched by nobody but us from `submit` until the job is taken as finished. Jobs that fail are
    finished too: nothing is raised for what the tier does.
    """

    def __init__(
        self, tier: Tier, store_key: Callable[[bytes], StoreKey], limits: Limits, *, clock: Clock = MONOTONIC
    ) -> None:
        """
        :param tier: the caller's. Its calls have deadlines, on which those of `drain` and `close` rest.
        :param store_key: what the tier calls a key. Called from other threads.
        """
        self._tier, self._store_key, self._limits, self._clock = tier, store_key, limits, clock
        self._loading = started_threads(limits.load_threads, "kvtier-load")
        self._saving = started_threads(1, "kvtier-save")
        self._open: dict[int, tuple[Outcome, Future[None] | None]] = {}
        """Jobs whose outcome was not taken yet, by id; a job without a future was dropped."""
        self._num_saving = 0
        """Chunks of stores in `_open` that were not dropped."""
        self._stopping = threading.Event()
        """Set while jobs should end after the batch that they are at."""

    def load(self, job_id: int, request_id: str, keys: Sequence[bytes], rows: Sequence[memoryview]) -> None:
        """Fills rows with their chunks."""
        job = Job(job_id, request_id, keys, rows, True, self._clock() + self._limits.load_deadline_s)
        outcome = Outcome(job)
        self._open[job_id] = (outcome, self._loading.submit(self._run, self._load, outcome))

    def store(self, job_id: int, request_id: str, keys: Sequence[bytes], rows: Sequence[memoryview]) -> bool:
        """Copies rows to the pool, unless it has them. False: too many wait already, and this one is dropped."""
        if self._num_saving and self._num_saving + len(keys) > self._limits.max_saving_chunks:
            self.drop(job_id, request_id, keys)
            return False
        outcome = Outcome(Job(job_id, request_id, keys, rows, False))
        self._open[job_id] = (outcome, self._saving.submit(self._run, self._store, outcome))
        self._num_saving += len(keys)
        return True

    def drop(self, job_id: int, request_id: str, keys: Sequence[bytes]) -> None:
        """A store that is not wanted: finished, and nothing was moved."""
        self._open[job_id] = (Outcome(Job(job_id, request_id, keys, (), False)), None)

    def take_finished(self) -> list[Outcome]:
        """What has ended since the last call, each once."""
        self._give_up_late_loads()
        finished = [each for each in self._open.values() if each[1] is None or each[1].done()]
        for outcome, future in finished:
            del self._open[outcome.job.job_id]
            if future is not None and not outcome.job.is_load:
                self._num_saving -= len(outcome.job.keys)
        return [outcome for outcome, _ in finished]

    def drain(self) -> None:
        """Blocks until no thread is at a row: what has not begun is cancelled, what has ends after its batch."""
        self._stopping.set()
        futures = [future for _, future in self._open.values() if future is not None]
        wait([future for future in futures if not future.cancel()])
        self._stopping.clear()

    def close(self) -> None:
        """Drains, ends the threads, and lets go of all rows. Idempotent."""
        self.drain()
        self._open.clear()
        self._loading.shutdown(cancel_futures=True)
        self._saving.shutdown(cancel_futures=True)

    def _give_up_late_loads(self) -> None:
        """Gives up late loads that have not begun: all threads may be waiting for a pool that hangs."""
        now = self._clock()
        for outcome, future in self._open.values():
            if future is not None and now > outcome.job.deadline:
                future.cancel()

    def _run(self, move: Callable[[Outcome], None], outcome: Outcome) -> None:
        """Runs a job in one of the threads."""
        started = self._clock()
        try:
            move(outcome)
        except Exception:
            # Tiers do not raise. A bug in one must not reach the scheduler, which would end the engine.
            _log.exception("a job of %d chunks with %s failed", len(outcome.job.keys), self._tier.name)
        outcome.seconds = self._clock() - started

    def _load(self, outcome: Outcome) -> None:
        for keys, rows in self._batches(outcome.job):
            statuses = self._tier.read([self._store_key(key) for key in keys], rows)
            loaded = [key for key, status in zip(keys, statuses, strict=True) if status is Status.HIT]
            outcome.moved += loaded
            if not loaded:
                break  # a pool that has nothing of these, or does not answer, is not worth another deadline

    def _store(self, outcome: Outcome) -> None:
        for keys, rows in self._batches(outcome.job):
            named = [self._store_key(key) for key in keys]
            is_there = [status in _PRESENT for status in self._tier.lookup(named)]
            missing = [i for i, there in enumerate(is_there) if not there]
            if missing:
                statuses = self._tier.write([(named[i], rows[i], checksum(named[i], rows[i])) for i in missing])
                for i, status in zip(missing, statuses, strict=True):
                    is_there[i] = status in _THERE
            outcome.moved += [key for key, there in zip(keys, is_there, strict=True) if there]
            if not any(is_there):
                break

    def _batches(self, job: Job) -> Iterator[tuple[Sequence[bytes], Sequence[memoryview]]]:
        size = self._limits.batch_chunks
        for start in range(0, len(job.keys), size):
            if self._stopping.is_set() or self._clock() > job.deadline:
                return
            yield job.keys[start : start + size], job.rows[start : start + size]
