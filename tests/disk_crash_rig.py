"""Kills a process that works on a disk tier, again and again, and looks what is left: by hand, or from a test.

    python tests/disk_crash_rig.py [--rounds 200] [--seed N]

Half of the rounds end in a file operation that the seed chooses, and replay exactly; the others end at a moment that
another process chooses.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from disk_crash_child import CAPACITY_BYTES, NUM_LABELS, TENANTS, open_tier, payload, payload_bytes
from disk_rig import used_bytes
from kvtier.keys import tenant_id
from kvtier.testing.blocks import make_key, read_blocks

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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Kills a process that works on a disk tier, again and again.")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvtier-crash-") as home:
        run_rounds(Path(home) / "disk", options.seed, options.rounds)
    print(f"{options.rounds} rounds, nothing wrong")
