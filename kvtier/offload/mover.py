"""The mover: the half of the hierarchy that has the memory. One per worker process (rank).

Threads: a few for loads, one for copies from the device, one for checksums of what goes down, one writer per lower
tier, so that a slow tier holds up nobody else. What they may take on is bounded by the arena: the directory gives
every block on the move a slot of it, but for those that a tier may lend.
"""

import enum
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from kvtier.clock import MONOTONIC
from kvtier.codec.checksums import checksum
from kvtier.device.kv import Blocks, DeviceKV, Fence
from kvtier.device.layered_loads import CopiesByLayer
from kvtier.errors import ClosedError, InvalidInputError
from kvtier.identity.keys import BlockKey, NamespaceId, StoreKey, rank_keys
from kvtier.memory.arena import Arena
from kvtier.offload.inventory import InventoryLog
from kvtier.offload.messages import (
    HOST,
    CancelBatch,
    Cancelled,
    Copied,
    DiscardBatch,
    Discarded,
    Inventory,
    LoadBatch,
    Loaded,
    Queued,
    SaveBatch,
    StoreBatch,
    Stored,
    ToDirectory,
    ToMover,
)
from kvtier.offload.replica import ALONE, Replica
from kvtier.tiers.base import Item, Status, Tier, WriteStatus
from kvtier.tiers.sidecar import DirectReads

_HOST_LOADS = 2
"""Threads for what is in the arena: one asks for a batch's transfers while those of another are under way."""
OTHER_COPIES = 1 + _HOST_LOADS
"""How many copies a mover has under way at a time, beside one per thread that loads from tiers: a save, too."""

_THERE = (WriteStatus.STORED, WriteStatus.EXISTS)

_log = logging.getLogger(__name__)


class _LoadState(enum.Enum):
    RUNNING = enum.auto()
    COPYING = enum.auto()
    """The device slots are being written: too late to cancel."""
    CANCELLED = enum.auto()


@dataclass(slots=True)
class _Save:
    """Blocks in the arena on their way to tiers below. `waiting` and `refused` are guarded by Mover._lock."""

    batch_id: int
    keys: list[bytes]
    items: list[Item[memoryview]]
    waiting: set[str]
    refused: dict[str, list[bytes]] = field(default_factory=dict)


class Mover:
    """Carries out batches. `fence` and `submit` are for the engine's thread, `poll` and `wait` for any; none blocks
    on I/O.

    The caller owns device and tiers and closes them after the mover.
    """

    def __init__(  # noqa: PLR0913 - the parts that it is put together from
        self,
        *,
        namespace: NamespaceId,
        device: DeviceKV,
        arena: Arena,
        tiers: Mapping[str, Tier],
        direct_reads: Mapping[str, DirectReads] | None = None,
        inventory: InventoryLog,
        num_load_threads: int = 2,
        forget_untold: Callable[[str], None] = lambda tier: None,
        shared_tiers: Collection[str] = (),
        replica: Replica = ALONE,
        layered: CopiesByLayer | None = None,
    ) -> None:
        """
        :param tiers: the tiers below the arena by name.
        :param direct_reads: for those of the tiers that give leases of their memory, by name.
        :param inventory: listens to those of the tiers that belong to this mover alone.
        :param num_load_threads: batches under way at a time, each with arena slots of its own: 2 are a double
            buffer, one read from its tier while the other is copied to the device; more help tiers with latency.
        :param forget_untold: has the tier of this name drop blocks that it has written since its last message to the
            inventory, of which the directory cannot know. Called when a discard arrives; must not block.
        :param shared_tiers: those of the tiers that the movers of all ranks have.
        :param replica: which of the blocks written to these are this mover's to write.
        :param layered: copies of `device` by layer; needed for loads by layer only.
        """
        if arena.slot_bytes < device.block_bytes:
            raise InvalidInputError(
                f"arena slots of {arena.slot_bytes} bytes cannot hold blocks of {device.block_bytes}"
            )
        self._namespace = namespace
        self._device, self._arena, self._tiers = device, arena, dict(tiers)
        self._direct_reads = dict(direct_reads or {})
        self._inventory, self._forget_untold = inventory, forget_untold
        self._shared_tiers, self._replica = frozenset(shared_tiers), replica
        self._layered = layered
        self._block_bytes = device.block_bytes
        self._loads = ThreadPoolExecutor(num_load_threads, "kvtier-load")
        self._host_loads = ThreadPoolExecutor(_HOST_LOADS, "kvtier-load-host")
        """Nothing that is in the arena already waits for a tier."""
        self._copies = ThreadPoolExecutor(1, "kvtier-copy")
        self._sums = ThreadPoolExecutor(1, "kvtier-checksum")
        """Between copies and writers: no copy waits for checksums, and blocks for several tiers are summed once."""
        self._writers = {name: ThreadPoolExecutor(1, f"kvtier-write-{name}") for name in self._tiers}
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._running: dict[int, _LoadState] = {}  # guarded by _lock
        self._saving: set[int] = set()
        """Save batches that may still read the device, by id. Guarded by _lock."""
        self._loaded_s: dict[str, float] = {}
        """The time when the last batch of each tier was there, by tier. Guarded by _lock."""
        self._outbox: list[ToDirectory] = []  # guarded by _lock
        self._changes: list[Inventory] = []  # taken from the inventory for the next poll; guarded by _lock
        self._nudged = False  # guarded by _lock
        self._closed = False  # guarded by _lock

    def fence(self) -> Fence | None:
        """The device's `DeviceKV.fence`."""
        return self._device.fence()

    def submit(self, messages: Sequence[ToMover], *, loads_after: Fence | None = None) -> None:
        """Starts messages of the directory, in order. It is called when all is queued that writes the blocks to save.

        :param loads_after: what last used the device slots to load to is before it. None: it has been queued until now.
        """
        until_now = self._device.fence() if any(isinstance(m, LoadBatch | SaveBatch) for m in messages) else None
        for message in messages:
            self._start(message, saves_after=until_now, loads_after=loads_after or until_now)

    def copying(self, batch_ids: Iterable[int]) -> set[int]:
        """The save batches among these that may still read the device. One that `Copied` tells of does not."""
        with self._lock:
            return self._saving.intersection(batch_ids)

    def cancel_loads(self) -> None:
        """No load writes to the device any more, except those that `is_at_device` counts. Does not wait for a tier.

        The directory hears of each as if it had cancelled it: what their tiers still bring is kept in the arena.
        """
        with self._lock:
            for batch_id in self._running:
                self._cancel(batch_id)

    @property
    def is_at_device(self) -> bool:
        """Whether a copy from or to the device is under way, or a save that was submitted waits for its turn."""
        with self._lock:
            return bool(self._saving) or _LoadState.COPYING in self._running.values()

    def _start(self, message: ToMover, *, saves_after: Fence | None, loads_after: Fence | None) -> None:
        with self._lock:
            if self._closed:
                raise ClosedError("the mover is closed")
            if isinstance(message, LoadBatch):
                self._running[message.batch_id] = _LoadState.RUNNING
                (self._host_loads if message.source == HOST else self._loads).submit(self._load, message, loads_after)
            elif isinstance(message, SaveBatch):
                self._saving.add(message.batch_id)
                self._copies.submit(self._save, message, saves_after)
            elif isinstance(message, StoreBatch):
                self._sums.submit(self._hand_down, message, [message.tier])
            elif isinstance(message, DiscardBatch):
                # By way of the copies: what is being copied at this moment is written first, then forgotten.
                self._copies.submit(self._discard, self._with_unheard(message))
            elif isinstance(message, CancelBatch):
                self._cancel(message.batch_id)
            else:
                raise InvalidInputError(f"{type(message).__name__} is not for a mover")

    def poll(self) -> list[ToDirectory]:
        """Messages for the directory since the last poll."""
        with self._lock:
            out, self._outbox = self._outbox, []
            changes, self._changes = [*self._changes, *self._inventory.drain()], []
        # Before the answers: a block that is reported stored is then known to be where it is.
        return [*changes, *out]

    def wait(self, timeout_s: float) -> None:
        """Blocks until `poll` has an answer to a batch, or until `nudge`, at most `timeout_s`."""
        with self._ready:
            self._ready.wait_for(lambda: bool(self._outbox) or self._nudged or self._closed, timeout_s)
            self._nudged = False

    def nudge(self) -> None:
        """Ends the present `wait`, or else the next one. Any thread."""
        with self._ready:
            self._nudged = True
            self._ready.notify_all()

    def close(self) -> None:
        """Finishes what was submitted, then stops the threads. Idempotent."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()
        self._loads.shutdown(cancel_futures=False)
        self._host_loads.shutdown(cancel_futures=False)
        self._copies.shutdown(cancel_futures=False)
        self._sums.shutdown(cancel_futures=False)
        for writer in self._writers.values():
            writer.shutdown(cancel_futures=False)

    def _post(self, message: ToDirectory) -> None:
        with self._ready:
            self._outbox.append(message)
            self._ready.notify_all()

    def _cancel(self, batch_id: int) -> None:
        """Caller holds _lock. A load that is over or copying answers by itself."""
        if self._running.get(batch_id) is _LoadState.RUNNING:
            self._running[batch_id] = _LoadState.CANCELLED
            self._outbox.append(Cancelled(batch_id))
            self._ready.notify_all()

    def _store_keys(self, keys: Iterable[bytes]) -> list[StoreKey]:
        return rank_keys(map(BlockKey, keys), self._namespace)

    def _view(self, slot: int) -> memoryview:
        return self._arena.view(slot)[: self._block_bytes]

    def _load(self, batch: LoadBatch, after: Fence | None) -> None:
        begun_s, waited_s, ok = MONOTONIC(), 0.0, bytes(len(batch.keys))
        try:
            ok, waited_s = self._fetch_from(batch, after)
        except Exception:
            # A bug or a broken device must not end the thread and leave the engine waiting: it computes.
            _log.exception("loading %d blocks from %s failed", len(batch.keys), batch.source)
            ok = bytes(len(batch.keys))
        with self._lock:
            del self._running[batch.batch_id]
            # Batches of one tier that run side by side share what it can do: no time counts twice. What the engine's
            # own work took does not count at all: it says nothing of the tier.
            now, before_s = MONOTONIC(), self._loaded_s.get(batch.source, 0.0)
            seconds, self._loaded_s[batch.source] = max(0.0, now - max(begun_s + waited_s, before_s)), now
        self._post(Loaded(batch.batch_id, ok, seconds))

    def _fetch_from(self, batch: LoadBatch, after: Fence | None) -> tuple[bytes, float]:
        """Returns which blocks are on the device, and the seconds that the copy waited for the engine."""
        if batch.by_layer:
            return self._fetch_by_layer(batch, after), 0.0
        return self._fetch(batch, after) if batch.arena_slots else self._fetch_leased(batch, after)

    def _fetch_by_layer(self, batch: LoadBatch, after: Fence | None) -> bytes:
        """Blocks of the arena, layer after layer. The directory hears of it when all copies are queued."""
        if self._layered is None:
            raise InvalidInputError("this mover's device does not copy by layer")
        if self._begin_copy(batch):
            self._layered.scatter(
                Blocks(self._arena, batch.arena_slots, batch.device_slots),
                after=after,
                on_queued=lambda: self._post(Queued(batch.batch_id)),
            )
        return b"\1" * len(batch.keys)

    def _fetch(self, batch: LoadBatch, after: Fence | None) -> tuple[bytes, float]:
        """Loads by way of the arena. Returns which blocks are there, and how long the copy waited for the engine."""
        ok, waited_s = self._read(batch), 0.0
        if self._begin_copy(batch):
            present = [i for i, good in enumerate(ok) if good]
            slots, device_slots = [batch.arena_slots[i] for i in present], [batch.device_slots[i] for i in present]
            waited_s = self._device.scatter(self._arena, slots, device_slots, after=after)
        return ok, waited_s

    def _fetch_leased(self, batch: LoadBatch, after: Fence | None) -> tuple[bytes, float]:
        """Loads from where the blocks lie in the memory of their tier. What changed meanwhile is no block."""
        keys, waited_s, direct_read = self._store_keys(batch.keys), 0.0, None
        direct_reads = self._direct_reads.get(batch.source)
        if direct_reads is not None and not self._is_cancelled(batch):
            direct_read = direct_reads.start_read(keys, self._block_bytes)
        if direct_reads is None or direct_read is None:
            return bytes(len(keys)), waited_s
        try:
            if direct_read.blocks and self._begin_copy(batch):
                sources = [
                    Blocks(leased.memory, leased.slots, [batch.device_slots[i] for i in leased.indexes])
                    for leased in direct_read.blocks
                ]
                waited_s = self._device.scatter_all(sources, after=after)
        finally:
            whole = direct_reads.end_read(direct_read)
        return bytes(whole), waited_s

    def _is_cancelled(self, batch: LoadBatch) -> bool:
        with self._lock:
            return self._running[batch.batch_id] is _LoadState.CANCELLED

    def _begin_copy(self, batch: LoadBatch) -> bool:
        """Whether the device slots may be written."""
        with self._lock:
            if self._running[batch.batch_id] is _LoadState.CANCELLED:
                return False
            self._running[batch.batch_id] = _LoadState.COPYING
            return True

    def _read(self, batch: LoadBatch) -> bytes:
        if batch.source == HOST:
            return b"\1" * len(batch.keys)
        if self._is_cancelled(batch):
            return bytes(len(batch.keys))
        tier = self._tiers[batch.source]
        statuses = tier.read(self._store_keys(batch.keys), [self._view(slot) for slot in batch.arena_slots])
        return bytes(status is Status.HIT for _, status in zip(batch.keys, statuses, strict=True))

    def _save(self, batch: SaveBatch, after: Fence | None) -> None:
        ok = b"\1" * len(batch.keys)
        try:
            self._device.gather(batch.device_slots, self._arena, batch.arena_slots, after=after)
        except Exception:
            _log.exception("copying %d blocks from the device failed", len(batch.keys))
            ok = bytes(len(batch.keys))
        with self._lock:
            self._saving.discard(batch.batch_id)
        self._post(Copied(batch.batch_id, ok))
        if not batch.tiers or not any(ok):
            self._post(Stored(batch.batch_id))
            return
        self._sums.submit(self._hand_down, batch, batch.tiers)

    def _hand_down(self, batch: SaveBatch | StoreBatch, tiers: Sequence[str]) -> None:
        """Sums the batch's blocks, and queues their arena slots for these tiers."""
        try:
            blocks = zip(self._store_keys(batch.keys), map(self._view, batch.arena_slots), strict=True)
            items = [(key, view, checksum(key, view)) for key, view in blocks]
        except Exception:  # the directory must hear of the end, or the slots are never given to others
            _log.exception("summing %d blocks failed", len(batch.keys))
            self._post(Stored(batch.batch_id, dict.fromkeys(tiers, batch.keys)))
            return
        save = _Save(batch.batch_id, batch.keys, items, waiting=set(tiers))
        for name in tiers:
            self._writers[name].submit(self._write, name, save)

    def _discard(self, batch: DiscardBatch) -> None:
        self._sums.submit(lambda: self._writers[batch.tier].submit(self._forget, batch))

    def _with_unheard(self, batch: DiscardBatch) -> DiscardBatch:
        """Returns the batch with what its tier holds and the directory cannot have heard of yet. Caller holds _lock."""
        self._forget_untold(batch.tier)
        changes = self._inventory.drain()
        self._changes += changes
        unheard = [key for change in changes if change.tier == batch.tier for key in change.added]
        return replace(batch, keys=[*batch.keys, *unheard])

    def _forget(self, batch: DiscardBatch) -> None:
        try:
            self._tiers[batch.tier].discard(self._store_keys(batch.keys))
        except Exception:
            _log.exception("discarding %d blocks in %s failed", len(batch.keys), batch.tier)
        self._post(Discarded(batch.batch_id))

    def _write(self, name: str, save: _Save) -> None:
        mine: Sequence[int] = range(len(save.items))
        if name in self._shared_tiers:
            mine = [i for i in mine if self._replica.writes(save.items[i][0])]
        refused = mine
        try:
            statuses = self._tiers[name].write([save.items[i] for i in mine]) if mine else []
            refused = [i for i, status in zip(mine, statuses, strict=True) if status not in _THERE]
        except Exception:
            _log.exception("writing %d blocks to %s failed", len(save.items), name)
        with self._lock:
            if refused:
                save.refused[name] = [save.keys[i] for i in refused]
            save.waiting.discard(name)
            over = not save.waiting
        if over:
            self._post(Stored(save.batch_id, save.refused))
