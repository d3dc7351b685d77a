"""What each kind of fault of `make chaos` does to the site, and how it is put right. One thread."""

import contextlib
import heapq
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from chaos_schedule import Fault
from chaos_site import Site, replica_of
from kvtier.testing.faulty_link import LinkFault
from suspending import resume, suspend

_MIB = b"\0" * (1 << 20)
_Undo = Callable[[], None]


class Faults:
    """Begins and ends faults when their time has come."""

    def __init__(self, site: Site, planned: Sequence[Fault], tell: Callable[[str], None]) -> None:
        self._site, self._tell = site, tell
        self._waiting = sorted(planned, key=lambda fault: -fault.at_s)
        self._under_way: list[tuple[float, int, _Undo]] = []
        """A heap: by when they end."""
        self.counts: Counter[str] = Counter()
        """Faults that have begun, by kind."""

    def go_on(self, now_s: float) -> bool:
        """What is due is begun and ended; whether more is to come.

        :param now_s: since the schedule's beginning. What takes long here, as the start of a Redis, delays the rest.
        """
        while self._under_way and self._under_way[0][0] <= now_s:
            heapq.heappop(self._under_way)[2]()
        while self._waiting and self._waiting[-1].at_s <= now_s:
            fault = self._waiting.pop()
            self._tell(f"{now_s:6.1f} s {fault}")
            undo = self._begin(fault)
            self.counts[fault.kind] += 1
            heapq.heappush(self._under_way, (fault.end_s, sum(self.counts.values()), undo))
        return bool(self._waiting or self._under_way)

    def end(self) -> None:
        """All that is under way, at once."""
        while self._under_way:
            with contextlib.suppress(OSError):
                heapq.heappop(self._under_way)[2]()

    def _begin(self, fault: Fault) -> _Undo:
        site = self._site
        if fault.kind in list(LinkFault):
            link = site.links[fault.target]
            link.fail(LinkFault(fault.kind), fault.parameters.get("delay_s", 0.0))
            return link.heal
        undo: _Undo = getattr(self, f"_{fault.kind}")(fault)
        return undo

    def _kill(self, fault: Fault) -> _Undo:
        if fault.target.endswith("-io"):
            for pid in self._pids(fault.target):
                os.kill(pid, signal.SIGKILL)
            return _nothing  # the engine starts another one
        member = self._site.members[fault.target]
        member.kill()
        return member.start

    def _stop(self, fault: Fault) -> _Undo:
        pids = self._pids(fault.target)
        for pid in pids:
            suspend(pid)

        def go_on() -> None:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):  # a tier process that hung may have been ended for it
                    resume(pid)

        return go_on

    def _redis_down(self, fault: Fault) -> _Undo:
        redis = self._site.redis
        redis.kill()
        return redis.start

    def _redis_failover(self, fault: Fault) -> _Undo:
        """The server dies, its replica is promoted, and all links lead there. The dead one comes back as a replica."""
        site = self._site
        dead, site.redis = site.redis, site.replica
        dead.kill()
        with site.redis.client() as client:
            client.execute_command("REPLICAOF", "NO", "ONE")
        site.redis.arguments = ()
        for name, link in site.links.items():
            if name.endswith(">redis"):
                link.lead_to(("127.0.0.1", site.redis.port))
        site.replica = dead

        def come_back() -> None:
            dead.arguments = replica_of(site.redis)
            dead.start()

        return come_back

    def _disk_full(self, fault: Fault) -> _Undo:
        ballast = self._site.small_disk / "ballast" if self._site.small_disk is not None else Path()
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while file.write(_MIB):
                continue
        return ballast.unlink

    def _disk_hung(self, fault: Fault) -> _Undo:
        disk = self._site.disk
        assert disk is not None
        disk.hang()
        return disk.answer

    def _clock_jump(self, fault: Fault) -> _Undo:
        clock = self._site.clock
        assert clock is not None
        clock.turn(int(fault.parameters["jump_s"]))
        return lambda: clock.turn(0)

    def _pids(self, target: str) -> list[int]:
        """The process, or those of an engine's tiers."""
        if target == "redis":
            return [self._site.redis.process.pid]
        pid = self._site.members[target.removesuffix("-io")].service.process.pid
        if not target.endswith("-io"):
            return [pid]
        return [child.pid for child in psutil.Process(pid).children()]


def _nothing() -> None:
    """What is put right by itself."""


def wait_until(deadline_s: float, condition: Callable[[], bool]) -> bool:
    """Whether it holds in time, by the monotonic clock."""
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True
