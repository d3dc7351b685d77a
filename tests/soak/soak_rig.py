"""One run of the soak: faults by plan, samples of the pool, and what may not be found at the end."""

import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.errors import KvtierError
from kvtier.testing.blocks import make_key, make_payload, summed
from kvtier.tiers.base import WriteStatus
from pool_rig import MIB, connect
from soak_processes import MEMORY_BYTES, SETTLED_S, Clients, Pool, Sample
from suspending import resume, suspend

PATHS = ("shm", "unix", "tcp", "grpc")
_NUM_CLIENTS = 6
"""At a time: every path has one at least."""
_START_S = 60.0
"""The longest time that they are given to begin."""
_BESIDES_BYTES = 96 * MIB
"""What connections, buffers of I/O threads and gRPC may take of a pool's memory."""
_LAZY_THREADS = 16 + 8 + 8
"""Threads of a pool that has served for a while: gRPC's 16 and its pollers, and the disk tier's 4 each way. They come
with the calls that need them and stay. What leaks with every call or client leaves hundreds."""
_STEP_S = 0.05
_TAKEN = (WriteStatus.STORED, WriteStatus.EXISTS)
_QUIET_GAUGES = ("kvtier_pool_block_connections", "kvtier_pool_shared_held_bytes", "kvtier_pool_write_down_queue_bytes")
"""Zero in a pool without clients: connections, leases and write slots, blocks pinned for the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Mean seconds between two faults of a kind; 0: none of them."""

    kill_client_s: float = 0.0
    stop_client_s: float = 0.0
    kill_pool_s: float = 0.0
    restart_pool_s: float = 0.0
    freeze_pool_s: float = 0.0

    def schedule(self, rng: random.Random, seconds: float) -> list[tuple[float, str]]:
        """When what happens within so many seconds, the last first; each kind at least once."""
        planned: list[tuple[float, str]] = []
        for name in self.__slots__:
            if mean_s := getattr(self, name):
                num_times = max(1, round(rng.gauss(seconds / mean_s, math.sqrt(seconds / mean_s))))
                planned += [(rng.uniform(0.05, 0.95) * seconds, name.removesuffix("_s")) for _ in range(num_times)]
        return sorted(planned, reverse=True)


@dataclass(slots=True)
class Report:
    """What a run has found. Without `problems` all is well."""

    seed: int
    seconds: float
    paths: tuple[str, ...]
    counts: dict[str, int] = field(default_factory=dict)
    faults: list[tuple[float, str]] = field(default_factory=list)
    """When what happened."""
    samples: list[Sample] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Soak:
    """One run: a stormy first half in which the pool dies too, then a calmer one over a single pool, then silence.

    Growth is looked for where nothing but a leak explains it: between the halves of the calm phase, and in what that
    pool process still holds when all clients are gone.
    """

    def __init__(self, folder: Path, *, seed: int, seconds: float, paths: Sequence[str] = PATHS) -> None:
        self._folder, self._seconds = folder, seconds
        self._rng = random.Random(seed)
        self._pool = Pool(folder)
        self.report = Report(seed, seconds, tuple(paths))

    def run(self, stormy: Faults, calm: Faults, tell: Callable[[str], None]) -> Report:
        """:param tell: gets a line of progress every few seconds."""
        report, pool = self.report, self._pool
        self._started_s = time.monotonic()
        pool.start()
        clients: Clients | None = None
        try:
            fresh = pool.sample(self._started_s)
            clients = Clients(pool, self._folder, self._rng, report.paths, _NUM_CLIENTS)
            self._await_work(clients)
            self._phase("storm", clients, stormy, self._seconds / 2, tell)
            calm_from_s = time.monotonic() - self._started_s
            self._phase("calm", clients, calm, self._seconds / 2, tell)
            report.problems += clients.end()
            report.counts = dict(clients.counts())
            self._look_at_counts()
            self.look_at_growth(calm_from_s)
            self._look_at_what_is_left(fresh)
            self._look_at_room()
            self._end_pool()
        finally:
            if clients is not None:
                clients.end()
            if pool.service.process.poll() is None:
                pool.service.kill()
        faults = dict(Counter(kind for _, kind in report.faults))
        tell(f"{'FAILED' if report.problems else 'passed'}: {faults} {report.counts}")
        return report

    def _await_work(self, clients: Clients) -> None:
        """Until something was moved over each path: on a busy machine clients take seconds to start, and those that are
        killed before they have would show nothing."""
        give_up_s = time.monotonic() + _START_S
        while time.monotonic() < give_up_s:
            counts = clients.counts()
            if all(counts.get(f"bytes_{path}") for path in self.report.paths):
                return
            clients.go_on()
            time.sleep(_STEP_S)

    def _phase(self, name: str, clients: Clients, faults: Faults, seconds: float, tell: Callable[[str], None]) -> None:
        start_s = sample_s = told_s = time.monotonic()
        planned = faults.schedule(self._rng, seconds)
        # A pool that ends or starts slowly holds up what was planned after it, which then comes at once.
        while (now := time.monotonic()) < start_s + seconds or planned:
            clients.go_on()
            while planned and planned[-1][0] <= now - start_s:
                _, kind = planned.pop()
                self.report.faults.append((round(now - self._started_s, 2), kind))
                getattr(self, "_" + kind)(clients)
            if now >= sample_s:
                self.report.samples.append(self._pool.sample(self._started_s))
                sample_s += max(0.5, self._seconds / 200)
            if now >= told_s:
                counts = clients.counts()
                hits, stored = counts["read_hit"], counts["write_stored"]
                last = self.report.samples[-1]
                memory = f"{last.memory_bytes // MIB} + {last.slab_bytes // MIB} MiB"
                tell(f"{name}: {now - self._started_s:5.0f} s, {hits} hits, {stored} stored, pool {memory}")
                told_s += max(5.0, self._seconds / 30)
            time.sleep(_STEP_S)

    def _kill_client(self, clients: Clients) -> None:
        clients.kill()

    def _stop_client(self, clients: Clients) -> None:
        clients.stop_one(self._rng.uniform(0.2, 3.0))

    def _kill_pool(self, clients: Clients) -> None:
        self._pool.service.kill()
        self._pool.start()

    def _restart_pool(self, clients: Clients) -> None:
        self._end_pool()
        self._pool.start()

    def _freeze_pool(self, clients: Clients) -> None:
        suspend(self._pool.pid)
        time.sleep(self._rng.uniform(0.2, 3.0))
        resume(self._pool.pid)

    def _end_pool(self) -> None:
        try:
            self._pool.service.stop()
        except KvtierError as error:
            self.report.problems.append(str(error))

    def _look_at_counts(self) -> None:
        counts, problems = self.report.counts, self.report.problems
        if counts.get("mismatched"):
            problems.append(f"{counts['mismatched']} blocks were not what their keys say")
        if counts.get("corrupt"):
            problems.append(f"{counts['corrupt']} blocks came with a checksum that did not hold")
        problems += [name for name in counts if name.startswith("raised")]
        problems += [f"nothing was moved over {path}" for path in self.report.paths if not counts.get(f"bytes_{path}")]

    def look_at_growth(self, calm_from_s: float) -> None:
        """Between the two halves of the calm phase, which began so many seconds after the start.

        Memory by its peaks; descriptors and threads by their medians, as one burst of connections is no growth.
        """
        calm = [sample for sample in self.report.samples if sample.at_s >= calm_from_s]
        earlier = [sample for sample in calm if sample.at_s < calm_from_s + self._seconds / 4]
        later = [sample for sample in calm if sample.at_s >= calm_from_s + self._seconds / 4]
        if not earlier or not later:
            self.report.problems.append(
                f"{len(earlier)} and {len(later)} samples of the calm phase: nothing to compare"
            )
            return
        for name, slack, of_half in (
            ("memory_bytes", 16 * MIB, max),
            ("descriptors", 16, statistics.median_high),
            ("threads", 16, statistics.median_high),
        ):
            before, after = (of_half([getattr(sample, name) for sample in half]) for half in (earlier, later))
            if after > before * 1.1 + slack:
                self.report.problems.append(
                    f"{name} grew from {before} to {after} between the halves of the calm phase"
                )

    def _look_at_what_is_left(self, fresh: Sample) -> None:
        pool, problems = self._pool, self.report.problems
        deadline_s = time.monotonic() + SETTLED_S
        while any((held := {name: pool.gauge(name) for name in _QUIET_GAUGES}).values()):
            if time.monotonic() > deadline_s:
                problems.append(f"held by nobody: {held}")
                break
            time.sleep(0.1)
        left = pool.sample(self._started_s)
        for name, slack in (("descriptors", 8), ("threads", _LAZY_THREADS)):
            if getattr(left, name) > getattr(fresh, name) + slack:
                problems.append(f"{name} of a pool without clients: {getattr(fresh, name)} -> {getattr(left, name)}")
        num_bytes = left.memory_bytes + left.slab_bytes
        if num_bytes > fresh.memory_bytes + MEMORY_BYTES + _BESIDES_BYTES or left.slab_bytes > MEMORY_BYTES + MIB:
            problems.append(f"memory of a pool without clients: {fresh} -> {left}")

    def _look_at_room(self) -> None:
        """No slot is lost: memory and disk take twice the memory in new blocks, and the newest half of it is there."""
        labels, nbytes = range(2 * MEMORY_BYTES // MIB), MIB
        tier = connect(self._pool.address("tcp"))
        deadline_s = time.monotonic() + SETTLED_S
        try:
            for label in labels:
                item = summed(make_key(("room", label)), make_payload(("room", label), nbytes))
                while tier.write([item])[0] not in _TAKEN:
                    if time.monotonic() > deadline_s:
                        self.report.problems.append(f"no room for new blocks after {label} of {len(labels)}")
                        return
                    time.sleep(0.01)
            newest = labels[len(labels) // 2 :]
            buffers = [bytearray(nbytes) for _ in newest]
            tier.read([make_key(("room", label)) for label in newest], [memoryview(buffer) for buffer in buffers])
            lost = [i for i, b in zip(newest, buffers, strict=True) if b != make_payload(("room", i), nbytes)]
            if lost:
                self.report.problems.append(f"{len(lost)} acknowledged blocks are gone")
        finally:
            tier.close()
