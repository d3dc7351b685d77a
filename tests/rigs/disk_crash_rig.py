"""Kills a process that works on a disk tier, again and again, and looks what is left: by hand, or from a test.

    python tests/rigs/disk_crash_rig.py [--rounds 200] [--clients 200] [--seed N]

Rounds with one client: half of them end in a file operation that the seed chooses, and replay exactly; the others end
at a moment that another process chooses. Rounds with several clients at once: the seed replays what they ask for and
when the kill comes, not how threads take turns, so it may take several runs to see something again.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from disk_crash_child import CAPACITY_BYTES, NUM_LABELS, TENANTS, open_tier, payload, payload_bytes
from disk_crash_clients import BLOCKS, Load, read_versions
from disk_crash_clients import payload_bytes as client_bytes
from disk_crash_history import History
from disk_rig import used_bytes
from kvtier.identity.keys import tenant_id
from kvtier.testing.blocks import make_key, read_blocks
from kvtier.tiers.disk.medium.files import OsFiles

PATIENCE_S = 60.0
NEWEST = 4
"""So many blocks, written last of all, are too young to have been evicted."""

Block = tuple[str, int]
"""Tenant and label."""


@dataclass
class Oracle:
    """What may be there, by what a child said before and after each operation."""

    allowed: dict[Block, set[str | None]] = field(default_factory=dict)
    """Versions; None: nothing. A block that is not named was never written."""
    newest: list[Block] = field(default_factory=list)
    """Blocks that were acknowledged in this round, the last one last, without those that may be forgotten."""

    def hear(self, lines: Iterator[list]) -> bool:  # type: ignore[type-arg]
        """One round; whether the tier was ever open."""
        self.newest = []
        pending: list[object] = []
        opened = False
        for what, *words in lines:
            if what == "open":
                opened = True
            elif what in ("write", "discard", "purge"):
                pending = [what, *words]
                self._may(pending)
            elif what == "wrote":
                self._wrote(pending, words[0])
            elif what in ("discarded", "purged"):
                for block in self._named(pending):
                    self.allowed[block] = {None}
        return opened

    def _named(self, pending: list) -> list[Block]:  # type: ignore[type-arg]
        what, tenant, *words = pending
        labels = range(NUM_LABELS) if what == "purge" else words[0]
        return [(tenant, label) for label in labels]

    def _may(self, pending: list) -> None:  # type: ignore[type-arg]
        """It is under way: what was there may be, and what will be."""
        for block in self._named(pending):
            allowed = self.allowed.setdefault(block, {None})
            allowed.add(pending[3] if pending[0] == "write" else None)
            if block in self.newest:
                self.newest.remove(block)

    def _wrote(self, pending: list, stored: list[bool]) -> None:  # type: ignore[type-arg]
        for block, is_stored in zip(self._named(pending), stored, strict=True):
            if is_stored:
                self.allowed[block] = {pending[3], None}
                self.newest.append(block)
            else:
                self.allowed[block].discard(pending[3])


def run_round(folder: Path, oracle: Oracle, seed: int, number: int) -> int:
    """One child, killed; then every block is looked at. How many there are."""
    order = random.Random(f"{seed}/{number}/end")
    dies_at = order.randrange(1, 120) if number % 2 else 0
    command = [sys.executable, str(Path(__file__).parent / "disk_crash_child.py")]
    arguments = [str(folder), str(seed), str(number), str(dies_at)]
    with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            lines = [child.stdout.readline()]
            if not dies_at:
                for _ in range(order.randrange(1, 200)):
                    lines.append(child.stdout.readline())
                child.kill()
            lines += child.stdout.readlines()
            assert child.wait(PATIENCE_S) == -9, "it did not die as it should"
        finally:
            child.kill()
    oracle.hear(json.loads(line) for line in lines if line.endswith("\n"))
    return _check(folder, oracle)


def _check(folder: Path, oracle: Oracle) -> int:
    assert used_bytes(folder) <= CAPACITY_BYTES, "the folder took more than its capacity"
    tier = open_tier(str(folder))
    num_there = 0
    try:
        for name in TENANTS:
            for label in range(NUM_LABELS):
                key = make_key(label, tenant=tenant_id(name))
                (found,) = read_blocks(tier, [key], payload_bytes(name, label))
                allowed = oracle.allowed.get((name, label), {None})
                if found is None:
                    assert (name, label) not in oracle.newest[-NEWEST:], f"{name} {label} was acknowledged and is gone"
                    oracle.allowed[name, label] = {None}
                    continue
                versions = [v for v in allowed if v is not None and payload(name, label, v) == found]
                assert versions, f"{name} {label} is there, and none of {allowed}"
                oracle.allowed[name, label] = {versions[0], None}
                num_there += 1
        tier.check()
    finally:
        tier.close()
    assert used_bytes(folder) <= CAPACITY_BYTES
    return num_there


def run_rounds(folder: Path, seed: int, rounds: int) -> None:
    """Raises `AssertionError` at the first round after which something is wrong."""
    print(f"disk crash test: seed {seed}")
    oracle = Oracle()
    seen = 0
    for number in range(rounds):
        try:
            seen += run_round(folder, oracle, seed, number)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, round {number}: {error}") from error
    assert seen > rounds, "there was hardly anything to look at"


def client_load(seed: int, number: int) -> Load:
    """What clients do in one round, and on what tier."""
    order = random.Random(f"{seed}/{number}/load")
    dies_at, dies_answering = order.choice([(0, 0), (order.randrange(1, 500), 0), (0, order.randrange(1, 60))])
    return Load(
        seed=f"{seed}.{number}",
        num_clients=order.choice([2, 4, 6, 8]),
        capacity_bytes=order.choice([1, 1, 2, 4]) << 18,
        segment_bytes=order.choice([16, 32, 64, 256]) << 10,
        num_threads=order.choice([1, 2, 4, 4]),
        direct=order.random() < 0.5,
        sync=order.choice(["none", "none", "sealed", "batch"]),
        faults=order.choice([0.0, 0.0, 0.02]),
        most_pause_s=order.choice([0.0, 0.005, 0.02]),
        dies_at=dies_at,
        dies_answering=dies_answering,
    )


def run_clients_round(folder: Path, history: History, seed: int, number: int) -> int:
    """Processes with several clients each, killed one after the other; then every block is looked at."""
    order = random.Random(f"{seed}/{number}/end")
    load = client_load(seed, number)
    if order.random() < 0.3:  # this one at its start, or a moment later, before anybody has cleaned up
        first = replace(load, seed=f"{load.seed}.first")
        _kill_clients(folder, history, first, order.uniform(0, 0.05))
    dies_itself = load.dies_at or load.dies_answering
    opened = _kill_clients(folder, history, load, PATIENCE_S if dies_itself else order.uniform(0.05, 0.5))
    newest = history.newest(load.capacity_bytes // 16, client_bytes) if not load.faults else set()
    if opened:
        assert used_bytes(folder) <= load.capacity_bytes, "the folder took more than its capacity"
    tier = load.open(str(folder), OsFiles(direct=load.is_direct(str(folder))))
    try:
        num_there = 0
        for block in BLOCKS:
            (version,) = read_versions(tier, [block])
            history.found(block, version)
            assert version is not None or block not in newest, f"block {block} was acknowledged and is gone"
            num_there += version is not None
        tier.check()
    finally:
        tier.close()
    assert used_bytes(folder) <= load.capacity_bytes
    return num_there


def _kill_clients(folder: Path, history: History, load: Load, after_s: float) -> bool:
    """One process, killed so long after it began to open the tier; whether it had opened it."""
    history.next_process()
    command = [sys.executable, str(Path(__file__).parent / "disk_crash_clients.py"), str(folder), load.dump()]
    opened = False
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        killer = threading.Timer(after_s, child.kill)
        try:
            assert child.stdout is not None
            for line in child.stdout:
                words = json.loads(line) if line.endswith("\n") else ["torn"]
                if words == ["start"]:
                    killer.start()
                elif words == ["open"]:
                    opened = True
                elif words != ["torn"]:
                    history.hear(*words)
            assert child.wait(PATIENCE_S) == -9, "it did not die as it should"
        finally:
            killer.cancel()
            child.kill()
    history.killed()
    return opened


def run_clients_rounds(folder: Path, seed: int, rounds: int) -> None:
    """Raises `AssertionError` at the first round after which something is wrong."""
    print(f"disk crash test, several clients: seed {seed}")
    history = History()
    seen = 0
    for number in range(rounds):
        try:
            seen += run_clients_round(folder, history, seed, number)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, round {number}, {client_load(seed, number)}: {error}") from error
    assert seen > rounds, "there was hardly anything to look at"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Kills a process that works on a disk tier, again and again.")
    parser.add_argument("--rounds", type=int, default=200, help="with one client")
    parser.add_argument("--clients", type=int, default=200, help="rounds with several clients at once")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    for run, rounds in ((run_rounds, options.rounds), (run_clients_rounds, options.clients)):
        with tempfile.TemporaryDirectory(prefix="kvtier-crash-") as home:
            if rounds:
                run(Path(home) / "disk", options.seed, rounds)
    print(f"{options.rounds} rounds with one client, {options.clients} with several: nothing wrong")
