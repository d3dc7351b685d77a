"""The processes of the soak: a pool that can be restarted, and its clients."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.system.processes import Service
from pool_rig import MIB, TENANTS, TOKENS
from soak_client import ClientPlan, command
from suspending import suspend

MEMORY_BYTES = 48 * MIB
DISK_BYTES = 128 * MIB
NUM_LABELS = 1500
"""Blocks of each tenant: about 150 MiB of payload, so that memory evicts all the time and the disk does at last."""
SETTLED_S = 20.0
"""How long clients may take to end, and the pool to give back what they held."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What the pool process holds at a moment."""

    pool: int
    """Which of the pools: one more after every restart."""
    at_s: float
    memory_bytes: int
    """Resident, but for slabs."""
    slab_bytes: int
    """Resident in slabs; in a pool that shares no memory, 0: they count as other memory does."""
    descriptors: int
    """But for slabs and segments, which come and go with what is stored."""
    threads: int


class Pool:
    """`kvtier pool serve` over a folder, on the same addresses after every restart."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket = folder / "pool.sock"
        self._tcp = self._grpc = "127.0.0.1:0"
        self.num_starts = 0

    def start(self) -> None:
        """Returns when it serves."""
        tenants = [f"--tenant={name}={digest}" for digest, name in TENANTS.items()]
        self.service = Service(
            [
                *("pool", "serve", f"--listen=unix:{self._socket}", f"--listen={self._tcp}"),
                *(f"--grpc-listen={self._grpc}", "--http-listen=127.0.0.1:0", *tenants),
                *(f"--memory-bytes={MEMORY_BYTES}", f"--disk-dir={self._folder / 'disk'}"),
                *(f"--disk-bytes={DISK_BYTES}", "--shutdown-grace-s=5"),
            ],
            log=self._folder / "pool.log",
            environ={"KVTIER__POOL_SERVICE__DISK_RESERVE_BYTES": "0"},
        )
        addresses = self.service.ready()
        self.num_starts += 1
        self._tcp, self._grpc = addresses["block"].split(",")[1], addresses["grpc"]
        self._http = addresses["http"]

    @property
    def pid(self) -> int:
        return self.service.process.pid

    def address(self, path: str) -> str:
        """As engines are given it."""
        unix = f"unix:{self._socket}"
        return {"shm": unix, "unix": unix, "tcp": self._tcp, "grpc": f"grpc:{self._grpc}"}[path]

    def gauge(self, name: str) -> float:
        """The sum of a metric's samples."""
        with urllib.request.urlopen(f"http://{self._http}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    def sample(self, started_s: float) -> Sample:
        folder = Path(f"/proc/{self.pid}")
        descriptors = [_target(link) for link in (folder / "fd").iterdir()]
        (threads,) = re.findall(r"^Threads:\s+(\d+)$", (folder / "status").read_text(), re.MULTILINE)
        resident = _resident_bytes((folder / "smaps").read_text())
        return Sample(
            pool=self.num_starts,
            at_s=round(time.monotonic() - started_s, 2),
            memory_bytes=resident[False],
            slab_bytes=resident[True],
            # Slabs and segments are as many as memory and disk have room for. One that was removed must not stay open.
            descriptors=sum("memfd:" not in t and not t.endswith(".segment") for t in descriptors),
            threads=int(threads),
        )


@dataclass(slots=True)
class RunningClient:
    path: str
    plan: ClientPlan
    process: "subprocess.Popen[bytes]"
    stopped_until_s: float | None = None
    """When it goes on, by the monotonic clock; None while it runs."""


class Clients:
    """Client processes, spread over paths and tenants; each that dies is replaced by another of its kind."""

    def __init__(self, pool: Pool, folder: Path, rng: random.Random, paths: Sequence[str], count: int) -> None:
        self._pool, self._folder, self._rng = pool, folder, rng
        self.running: list[RunningClient] = []
        self.num_started = 0
        for number in range(count):
            self._start(paths[number % len(paths)], sorted(TOKENS)[number // len(paths) % len(TOKENS)])

    def kill(self) -> None:
        """SIGKILL of one, and a new one in its place."""
        victim = self.running.pop(self._rng.randrange(len(self.running)))
        victim.process.kill()
        victim.process.wait()
        assert victim.process.stdin is not None
        victim.process.stdin.close()
        self._start(victim.path, victim.plan.tenant)

    def stop_one(self, seconds: float) -> None:
        """SIGSTOP; `go_on` lets it run again."""
        awake = [client for client in self.running if client.stopped_until_s is None]
        if awake:
            victim = self._rng.choice(awake)
            suspend(victim.process.pid)
            victim.stopped_until_s = time.monotonic() + seconds

    def go_on(self, *, everybody: bool = False) -> None:
        """SIGCONT to those whose time has come."""
        now = time.monotonic()
        for client in self.running:
            if client.stopped_until_s is not None and (everybody or client.stopped_until_s <= now):
                client.process.send_signal(signal.SIGCONT)
                client.stopped_until_s = None

    def end(self) -> list[str]:
        """Ends all as a parent's end does, waits; what went wrong."""
        self.go_on(everybody=True)
        for client in self.running:
            assert client.process.stdin is not None
            client.process.stdin.close()
        problems = []
        while self.running:
            client = self.running.pop()
            try:
                if code := client.process.wait(SETTLED_S):
                    problems.append(f"client {client.plan} ended with code {code}")
            except subprocess.TimeoutExpired:
                problems.append(f"client {client.plan} did not end")
                client.process.kill()
                client.process.wait()
        return problems

    def counts(self) -> Counter[str]:
        """The sum of what all clients, dead ones too, have told by now."""
        total: Counter[str] = Counter()
        for log in self._folder.glob("client-*.jsonl"):
            lines = [line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
            total.update(json.loads(lines[-1]) if lines else {})
        return total

    def _start(self, path: str, tenant: str) -> None:
        number, self.num_started = self.num_started, self.num_started + 1
        plan = ClientPlan(
            address=self._pool.address(path),
            shared_memory=path == "shm",
            tenant=tenant,
            token=TOKENS[tenant],
            seed=self._rng.randrange(1 << 30),
            num_labels=NUM_LABELS,
            log=str(self._folder / f"client-{number}.jsonl"),
        )
        with (self._folder / "clients.log").open("ab") as log:
            process = subprocess.Popen(command(plan), stdin=subprocess.PIPE, stderr=log)
        self.running.append(RunningClient(path, plan, process))


def _resident_bytes(smaps: str) -> Counter[bool]:
    """Whether in slabs -> bytes."""
    total: Counter[bool] = Counter()
    in_slab = False
    for line in smaps.splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name:  # the mapping that the following lines are of
            in_slab = "/memfd:" in line
        elif name == "Rss:":
            total[in_slab] += int(rest.split()[0]) * 1024
    return total


def _target(link: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return os.readlink(link)
    return ""
