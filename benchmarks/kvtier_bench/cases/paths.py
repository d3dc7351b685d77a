"""`kvtier bench paths`: blocks between an engine's memory and a pool process, over every path there is."""

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.options import Json, Plot
from kvtier.clock import MONOTONIC
from kvtier.codec.checksums import checksum
from kvtier.errors import KvtierError
from kvtier.identity.keys import StoreKey
from kvtier.memory.malloc import keep_freed_memory
from kvtier.metrics import Metrics
from kvtier.system.working_folder import working_folder
from kvtier.tiers.base import Status
from kvtier.tiers.pool.tier import PoolTier
from kvtier_bench.measuring.blocks import NUM_SLOTS, Rotation, keys_of, repeated
from kvtier_bench.measuring.options import PayloadBytes, Rounds
from kvtier_bench.measuring.report import Case, report
from kvtier_bench.measuring.rounds import Samples, Spread, Subject, in_turn, percentile
from kvtier_bench.processes.peers import CHECKOUT, Peer, start_peers
from kvtier_bench.processes.pool_process import CALL_TIMEOUT_S, SHM, PoolProcess, pool_process
from kvtier_bench.processes.raw_socket import RawSocket

MEMCPY = "memcpy"
FLOORS = {"shm": MEMCPY, "unix": "raw unix", "tcp": "raw tcp", "grpc": "raw tcp"}
NUM_LOOKUP_KEYS = 4096
_LOOKUPS_A_ROUND = 8
_ACQUIRES_A_ROUND = {1: 5000, 128: 100}
"""How many acquires a round has, by the number of blocks in each. Rounds of single blocks take some tenths of a second:
two processes that wake each other up share a core at first, and the system takes so long to give each one its own."""
_ROOM = 16
"""Memory of the pool, in rounds: blocks to read, and blocks that each path writes."""


def bench_paths(
    json: Json = False,
    plot: Plot = None,
    payload_bytes: PayloadBytes = 2 << 20,
    batch: Annotated[int, typer.Option(min=1, help="Blocks per call; calls of one are measured as well.")] = 64,
    rounds: Rounds = 15,
    peers: Annotated[
        Path | None, typer.Option(help="Where `make peers` has prepared what to run beside; default: .venv/peers.")
    ] = None,
) -> None:
    """Read and write 64 blocks in turn over every path, beside a memcpy and bare sockets that move the same bytes.

    Every block has memory of its own on both sides, touched before. Our reads verify every block, peers' do not.
    CPU time is that of all processes which take part.
    """
    keep_freed_memory()
    num_slots = max(NUM_SLOTS, batch)
    with working_folder() as folder, ExitStack() as stack:
        memory_bytes = max(64 << 20, _ROOM * payload_bytes * num_slots)
        pool = stack.enter_context(pool_process(folder, memory_bytes))
        started, notes = start_peers(
            [payload_bytes, num_slots],
            environments=peers or CHECKOUT / ".venv" / "peers",
            logs=folder,
            stack=stack,
        )
        paths = Paths(Rotation(payload_bytes, num_slots), pool, started, rounds, stack)
        cases = []
        for op in ("read", "write"):
            for blocks_a_call in sorted({1, batch}, reverse=True):
                cases += paths.moves(op, blocks_a_call)
        cases += paths.lookups()
        if pool.shared_memory:
            cases += paths.acquires()
        else:
            notes.append("Without shm: the pool does not share its memory.")
    report("Paths to the pool", cases, as_json=json, plot=plot, notes=notes + paths.notes)


class Paths:
    """Everything that is compared, started."""

    def __init__(
        self, rotation: Rotation, pool: PoolProcess, peers: Sequence[Peer], rounds: int, stack: ExitStack
    ) -> None:
        """:param stack: closes what this opens."""
        self._rotation = rotation
        self.notes: list[str] = []
        """What could not be measured."""
        self._pids = (os.getpid(), pool.pid)
        self._pool, self._stack = pool, stack
        self._tiers = pool.tiers(stack)
        self._peers = peers
        self._rounds = rounds
        shape = (rotation.payload_bytes, len(rotation.sources))
        self._raw = {
            "raw tcp": stack.enter_context(RawSocket(socket.AF_INET, *shape)),
            "raw unix": stack.enter_context(RawSocket(socket.AF_UNIX, *shape)),
        }
        rotation.fill(next(iter(self._tiers.values())), "read")

    def moves(self, op: str, batch: int) -> list[Case]:
        """Reads or writes of all blocks, `batch` a call."""
        subjects: dict[str, Subject] = {MEMCPY: Subject(self._rotation.copies)}
        subjects |= {name: self._raw_subject(raw, op, batch) for name, raw in self._raw.items()}
        subjects |= {name: self._subject(tier, name, op, batch) for name, tier in self._tiers.items()}
        calls: dict[str, tuple[str, str]] = {}
        """Row and call of each peer's subject."""
        for peer in self._peers:
            for (row, call), subject in peer.subjects(op, batch).items():
                if not self._works(subject, f"{row}, {op} {batch}"):
                    continue
                subjects[f"{row} {call}"] = subject
                calls[f"{row} {call}"] = (row, call)
        samples = in_turn(subjects, rounds=self._rounds, label=f"{op}, {batch} a call")
        best = _best(calls, samples)
        others = {row: samples[name] for row, (name, _) in best.items()}
        cases = [self._case(MEMCPY, op, batch, samples, None, {})]
        for name in self._raw:
            cases.append(self._case(name, op, batch, samples, MEMCPY, {}))
        for name in self._tiers:
            floor = FLOORS[name]
            beside = {other: samples[other] for other in (MEMCPY,) if other != floor} | others
            cases.append(self._case(name, op, batch, samples, floor, beside))
        floors = {peer.kind.name: peer.kind.floor for peer in self._peers}
        for row, (name, call) in best.items():
            floor = next(floor for kind, floor in floors.items() if row.startswith(kind))
            cases.append(
                self._case(name, op, batch, samples, floor, {}, row=row, detail="" if row.endswith(call) else call)
            )
        return cases

    def _works(self, subject: Subject, what: str) -> bool:
        """A peer's call that fails is left out, with a note: it must not cost the figures of all others."""
        try:
            if subject.prepare is not None:
                subject.prepare()
            subject.run()
        except KvtierError as error:
            self.notes.append(f"Without {what}: {error}.")
            return False
        return True

    def lookups(self) -> list[Case]:
        """Lookups of blocks that the pool has in memory."""
        keys = keys_of(NUM_LOOKUP_KEYS, "lookup")
        first = next(iter(self._tiers.values()))
        first.write([(key, bytes(64), checksum(key, bytes(64))) for key in keys])

        def look_up(tier: PoolTier) -> None:
            if set(tier.lookup(keys)) != {Status.HIT}:
                raise KvtierError("a lookup missed: the figures would mean nothing")

        subjects = {
            name: Subject(repeated(lambda tier=tier: look_up(tier), _LOOKUPS_A_ROUND), pids=self._pids)  # type: ignore[misc]
            for name, tier in self._tiers.items()
        }
        samples = in_turn(subjects, rounds=self._rounds, label=f"lookup of {NUM_LOOKUP_KEYS:,} keys")
        return [Case.of(name, "lookup", of, batch=NUM_LOOKUP_KEYS) for name, of in samples.items()]

    def acquires(self) -> list[Case]:
        """Blocks held in place in shared memory and released again, nothing copied, beside a bare round trip."""
        tier = next(iter(self._tiers.values()))
        keys: list[StoreKey] = []
        while len(keys) < max(_ACQUIRES_A_ROUND):
            label = f"acquire-{len(keys)}"
            self._rotation.fill(tier, label)
            keys += keys_of(len(self._rotation.sources), label)
        transport = self._pool.local_transport(Metrics())
        self._stack.callback(transport.close)

        def acquire(batch: int) -> None:
            deadline = MONOTONIC() + CALL_TIMEOUT_S
            sizes = [self._rotation.payload_bytes] * batch
            lease, num_held = transport.memory.acquire(keys[:batch], sizes, deadline)
            transport.memory.release(lease, deadline)
            if num_held != batch:
                raise KvtierError("an acquire missed: the figures would mean nothing")

        floor = FLOORS["unix"]
        raw = self._raw[floor]
        bare = repeated(lambda: raw.write([], 0), _ACQUIRES_A_ROUND[1])
        subjects = {floor: Subject(bare, pids=(os.getpid(), raw.pid))}
        for batch, times in _ACQUIRES_A_ROUND.items():
            subjects[str(batch)] = Subject(repeated(partial(acquire, batch), times), pids=self._pids)
        samples = in_turn(subjects, rounds=self._rounds, label="acquire and release")
        cases = [Case.of(floor, "acquire", samples[floor], payload_bytes=0, batch=1)]
        for batch in _ACQUIRES_A_ROUND:
            of = samples[str(batch)]
            cases.append(
                Case.of(
                    SHM,
                    "acquire",
                    of,
                    floor=(floor, samples[floor]),
                    payload_bytes=self._rotation.payload_bytes,
                    batch=batch,
                    figures={"p50_us_per_block": percentile(of.calls_s, 50) * 1e6 / batch},
                )
            )
        return cases

    def _subject(self, tier: PoolTier, name: str, op: str, batch: int) -> Subject:
        if op == "read":
            return self._rotation.reads(tier, "read", batch, self._pids)
        return self._rotation.writes(tier, name, batch, self._pids)

    def _raw_subject(self, raw: RawSocket, op: str, batch: int) -> Subject:
        rotation = self._rotation
        starts = range(0, len(rotation.sources), batch)

        def read() -> list[float]:
            return [raw.read(rotation.into[at : at + batch], at) for at in starts]

        def write() -> list[float]:
            return [raw.write(rotation.sources[at : at + batch], at) for at in starts]

        return Subject(read if op == "read" else write, pids=(os.getpid(), raw.pid))

    def _case(
        self,
        name: str,
        op: str,
        batch: int,
        samples: Mapping[str, Samples],
        floor: str | None,
        beside: Mapping[str, Samples],
        *,
        row: str = "",
        detail: str = "",
    ) -> Case:
        return Case.of(
            row or name,
            op,
            samples[name],
            floor=None if floor is None else (floor, samples[floor]),
            beside=beside,
            round_bytes=self._rotation.nbytes,
            payload_bytes=self._rotation.payload_bytes,
            batch=batch,
            detail=detail,
        )


def _best(calls: Mapping[str, tuple[str, str]], samples: Mapping[str, Samples]) -> dict[str, tuple[str, str]]:
    """Maps each row to the subject whose call was fastest, and to that call."""
    best: dict[str, tuple[str, str]] = {}
    for name, (row, call) in sorted(calls.items(), key=lambda item: Spread.of(samples[item[0]].rounds_s).median_s):
        best.setdefault(row, (name, call))
    return dict(sorted(best.items()))
