"""The whole hierarchy as a `Store` of the state machine: device, arena, failing disk, and a shared tier that stalls."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hierarchy_rig import NAMESPACE, TENANT, Held, Rig, SomeLent, chain, until
from kvtier.codec.stored_form import Codec
from kvtier.identity.keys import rank_keys
from kvtier.offload import DirectorySettings, InventoryLog, JobResult
from kvtier.testing.faults import FaultyFiles
from kvtier.testing.states import NUM_LABELS
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.disk.medium.files import OsFiles
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.host.tier import HostTier

NUM_SLOTS = 10
"""Slots of the arena: less than the disk has, which has less than the shared tier."""
DISK_BLOCKS = 16
DEVICE_BLOCKS = 40
POISON = 0xEE

Bytes = npt.NDArray[np.uint8]

HASHES = chain(NUM_LABELS)
KEYS = rank_keys(HASHES, NAMESPACE)


@dataclass(frozen=True, slots=True)
class Running:
    """A job that was started and not waited for."""

    kind: str
    labels: list[int]
    slots: list[int]


class HierarchyStore:
    """Everything goes through the facade. Device slots that no job has must never change by themselves."""

    forgets_for_good = False

    def __init__(self, folder: Path, settings: DirectorySettings, *, leases: bool = False) -> None:
        """:param lends: the pool lends some of its blocks."""
        self._folder, self._settings = folder, settings
        self._shared = HostTier(2**17, slab_bytes=2**14, name="pool")
        self.pool = Held(self._shared)
        self.leased = SomeLent(self.pool) if leases else None
        self.hits: Counter[str] = Counter()
        """Blocks loaded, by the tier they came from."""
        self.loaded: list[tuple[int, bytes]] = []
        """Label and bytes of what loads brought, in whatever call they ended; the machine compares and clears it."""
        self.running: dict[int, Running] = {}
        self._open()
        self._disk.discard(KEYS)  # of an earlier example

    def write(self, blocks: Sequence[tuple[int, bytes]]) -> list[WriteStatus]:
        job_id = self.start_write(blocks, full=False)
        failed: frozenset[int] = frozenset()
        if job_id is not None:
            failed = self._wait_for(job_id).failed
        elif not all(self.rig.hierarchy.holds(HASHES[label]) for label, _ in blocks):
            return [WriteStatus.THROTTLED] * len(blocks)
        return [WriteStatus.FAILED if i in failed else WriteStatus.STORED for i in range(len(blocks))]

    def read(self, labels: Sequence[int]) -> list[bytes | None]:
        if not labels:
            return []
        slots = self._take_slots(len(labels))
        result = self._wait_for(self._start_load(labels, slots))
        return [None if i in result.failed else self._bytes_of(slot) for i, slot in enumerate(slots)]

    def lookup(self, labels: Sequence[int]) -> list[Status]:
        return [answer.status for answer in self.rig.lookup([HASHES[label] for label in labels])]

    def discard(self, labels: Sequence[int]) -> int:
        """Below only: what the arena and the device have stays there."""
        keys = [KEYS[label] for label in labels]
        return max(self._disk.discard(keys), self.pool.discard(keys))

    def num_blocks(self) -> int:
        return max(self._disk.usage().num_blocks, self.pool.usage().num_blocks)

    def reopen(self) -> None:
        """Another engine process at the same disk and pool."""
        self._close_engine()
        self._open()

    def check(self) -> None:
        self.rig.hierarchy.check()
        self._disk.check()
        self.pool.check()
        idle = [slot for slot in range(DEVICE_BLOCKS) if not self._users[slot]]
        assert (self.rig.device[idle] == self._expected[idle]).all(), "a device slot changed that no job has"

    def close(self) -> None:
        try:
            self._close_engine()
            self._shared.check()
        finally:
            self._shared.close()

    # What only a hierarchy can do

    def start_write(self, blocks: Sequence[tuple[int, bytes]], *, full: bool) -> int | None:
        """Blocks appear on the device and are saved; with `full`, as and when the policy for full blocks wants."""
        slots = self._take_slots(len(blocks))
        for slot, (_, payload) in zip(slots, blocks, strict=True):
            self._put(slot, np.frombuffer(payload, dtype=np.uint8))
        pairs = [(HASHES[label], slot) for (label, _), slot in zip(blocks, slots, strict=True)]
        hierarchy = self.rig.hierarchy
        job_ids = [hierarchy.save_full(pairs), hierarchy.note_hits(pairs)] if full else [hierarchy.start_save(pairs)]
        for job_id in job_ids:
            if job_id is not None:
                self._note(job_id, Running("save", [label for label, _ in blocks], slots))
        return job_ids[0]

    def start_read(self, labels: Sequence[int]) -> None:
        if labels:
            self._start_load(labels, self._take_slots(len(labels)))

    def poll(self) -> None:
        """Takes in what has ended; its slots may be used for anything from now on."""
        for result in self.rig.hierarchy.poll():
            self._end(result)

    def stall(self) -> None:
        """Reads and writes of the tiers below do not end until somebody waits for one."""
        self.pool.gate.clear()
        self.disk.gate.clear()

    def go_on(self) -> None:
        self.pool.gate.set()
        self.disk.gate.set()

    def cancel_all(self) -> None:
        for job_id in list(self.running):
            self.rig.hierarchy.cancel(job_id)

    def listen(self) -> set[tuple[str, bytes]]:
        """What somebody believes whom the directory's notes are read to: tiers, and keys of blocks there."""
        for tier, key in self._changes.take():
            if self._directory.has(tier, key):
                self._told.add((tier, key))
            else:
                self._told.discard((tier, key))
        return self._told

    def readable(self) -> set[tuple[str, bytes]]:
        """What he should believe."""
        return {(tier, key) for tier in self._changes.tiers for key in HASHES if self._directory.has(tier, key)}

    def finish(self) -> None:
        """Waits for all jobs."""
        for job_id in list(self.running):
            if job_id in self.running:
                self._wait_for(job_id)

    # Inside

    def _open(self) -> None:
        inventory = InventoryLog([TENANT], NAMESPACE)
        self.files = FaultyFiles(OsFiles(direct=False))
        self._disk = DiskTier.open(
            self._folder,
            3 * DISK_BLOCKS * 4096,  # a block written by itself takes three pages
            reserve_bytes=0,
            codec=Codec.LZ4,
            on_event=inventory.on_event,
            num_threads=2,
            files=self.files,
        )
        self.disk = Held(self._disk)
        self.rig = Rig(
            self.pool,
            local=self.disk,
            inventory=inventory,
            num_slots=NUM_SLOTS,
            num_blocks=DEVICE_BLOCKS,
            settings=self._settings,
            direct_reads=self.leased,
        )
        self._directory = self.rig.hierarchy._directory
        self._changes = self._directory.watch()
        self._told = self.readable()
        self.rig.device[:] = POISON
        self._expected = self.rig.device.copy()
        self._users = [0] * DEVICE_BLOCKS

    def _close_engine(self) -> None:
        self.go_on()
        try:
            self.finish()
            self.check()
        finally:  # the next example, or the shrunk one, opens the same folder
            try:
                self.rig.close()
                self._disk.check()
            finally:
                self._disk.close()

    def _take_slots(self, num_slots: int) -> list[int]:
        """Device slots that no job has; like an engine that evicts their blocks and uses them anew."""
        free = [slot for slot in range(DEVICE_BLOCKS) if not self._users[slot]]
        if len(free) < num_slots:
            self.go_on()
            self.finish()
            free = list(range(DEVICE_BLOCKS))
        for slot in free[:num_slots]:
            self._put(slot, POISON)
        return free[:num_slots]

    def _put(self, slot: int, content: Bytes | int) -> None:
        self.rig.device[slot] = self._expected[slot] = content

    def _start_load(self, labels: Sequence[int], slots: list[int]) -> int:
        job_id = self.rig.hierarchy.start_load([(HASHES[label], s) for label, s in zip(labels, slots, strict=True)])
        self._note(job_id, Running("load", list(labels), slots))
        return job_id

    def _note(self, job_id: int, running: Running) -> None:
        self.running[job_id] = running
        for slot in running.slots:
            self._users[slot] += 1

    def _wait_for(self, job_id: int) -> JobResult:
        self.go_on()
        results: list[JobResult] = []

        def poll() -> JobResult | None:
            self.rig.hierarchy.wait(0.05)
            results.extend(self.rig.hierarchy.poll())
            return next((result for result in results if result.job_id == job_id), None)

        found = until(poll)
        for result in results:
            self._end(result)
        return found

    def _end(self, result: JobResult) -> None:
        """The job's slots are the engine's again: whatever is in them now must stay."""
        job = self.running.pop(result.job_id)
        for index, (label, slot) in enumerate(zip(job.labels, job.slots, strict=True)):
            self._users[slot] -= 1
            if job.kind == "load":
                self._expected[slot] = self.rig.device[slot]
                if index not in result.failed:
                    self.loaded.append((label, self._bytes_of(slot)))
                    self.hits[result.tiers[index]] += 1

    def _bytes_of(self, slot: int) -> bytes:
        return self.rig.device[slot].tobytes()
