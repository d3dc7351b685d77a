"""What the mover's copies wait for, and whose time that is."""

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from threading import Event

import numpy as np
import pytest

from hierarchy_rig import BLOCK_BYTES, PATIENCE_S, Held, chain, memory_tier, until
from kvtier.device.kv import Blocks, Fence, HostMemoryKV
from kvtier.identity.keys import NamespaceId
from kvtier.memory.arena import Arena
from kvtier.offload import InventoryLog, Mover, MoverTiers
from kvtier.offload.messages import HOST, CancelBatch, Cancelled, Copied, LoadBatch, Loaded, SaveBatch, ToMover


class Device(HostMemoryKV):
    """Notes which fence each copy waits for. One to it takes `copy_s` by `clock`, of which it waits for `waited_s`."""

    def __init__(self) -> None:
        super().__init__(np.zeros((16, BLOCK_BYTES), dtype=np.uint8))
        self.fences: list[Fence] = []
        self.waits: list[tuple[str, Fence | None]] = []
        self.now = 0.0
        self.copy_s = self.waited_s = 0.0
        self.during_gather: Callable[[], None] = lambda: None
        self.during_scatter: Callable[[], None] = lambda: None

    def clock(self) -> float:
        return self.now

    def fence(self) -> Fence:  # type: ignore[override]
        self.fences.append(Fence())
        return self.fences[-1]

    def gather(
        self, device_slots: Sequence[int], arena: Arena, arena_slots: Sequence[int], *, after: Fence | None
    ) -> None:
        self.during_gather()
        self.waits.append(("save", after))
        super().gather(device_slots, arena, arena_slots, after=after)

    def scatter_all(self, sources: Sequence[Blocks], *, after: Fence | None) -> float:
        self.during_scatter()
        self.waits.append(("load", after))
        self.now += self.copy_s
        super().scatter_all(sources, after=after)
        return self.waited_s


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr("kvtier.offload.mover.fetcher.MONOTONIC", device.clock)
    return device


@pytest.fixture
def disk() -> Iterator[Held]:
    disk = Held(memory_tier("disk"))
    yield disk
    disk.close()


@pytest.fixture
def mover(device: Device, disk: Held) -> Iterator[Mover]:
    namespace = NamespaceId(bytes(16))
    mover = Mover(
        namespace=namespace,
        device=device,
        arena=Arena(16, BLOCK_BYTES),
        tiers=MoverTiers(by_name={disk.name: disk}, inventory=InventoryLog([], namespace)),
    )
    yield mover
    disk.gate.set()
    mover.close()


ids = count(1)
KEYS = [bytes(key) for key in chain(16)]


def save(*slots: int) -> SaveBatch:
    return SaveBatch(next(ids), [], [KEYS[slot] for slot in slots], list(slots), list(slots))


def load(*slots: int, source: str = HOST) -> LoadBatch:
    return LoadBatch(next(ids), source, [KEYS[slot] for slot in slots], list(slots), list(slots))


def answers(mover: Mover, kind: type, number: int) -> list[Cancelled | Copied | Loaded]:
    found: list[Cancelled | Copied | Loaded] = []

    def look() -> bool | None:
        mover.wait(0.05)
        found.extend(message for message in mover.poll() if isinstance(message, kind))
        return len(found) >= number or None

    until(look)
    return found


def submit(mover: Mover, *messages: ToMover, loads_after: Fence | None = None) -> None:
    mover.submit(messages, loads_after=loads_after)


def test_batches_of_a_step_wait_for_one_fence(mover: Mover, device: Device) -> None:
    submit(mover, save(0, 1), save(2), load(3), load(4))
    answers(mover, Loaded, 2)
    submit(mover, save(5))
    mover.close()
    assert len(device.fences) == 2
    first, second = device.fences
    assert sorted(device.waits[:4], key=str) == sorted([("save", first)] * 2 + [("load", first)] * 2, key=str)
    assert device.waits[4:] == [("save", second)]


def test_loads_wait_for_a_fence_of_their_own(mover: Mover, device: Device) -> None:
    earlier = mover.fence()
    assert earlier is not None
    submit(mover, save(0), load(1), loads_after=earlier)
    mover.close()
    assert dict(device.waits) == {"save": device.fences[1], "load": earlier}


def test_what_moves_nothing_makes_no_fence(mover: Mover, device: Device) -> None:
    submit(mover)
    submit(mover, CancelBatch(7))
    assert device.fences == []


def test_waiting_for_the_engine_is_no_part_of_a_load(mover: Mover, device: Device) -> None:
    """Three loads, one after the other, of which each takes three seconds. The planner hears how fast they were."""
    for waited_s, seconds in ((0.0, 3.0), (2.5, 0.5), (9.0, 0.0)):
        device.copy_s, device.waited_s = 3.0, waited_s
        submit(mover, load(1))
        (loaded,) = answers(mover, Loaded, 1)
        assert loaded.seconds == seconds


def test_a_save_reads_the_device_until_it_says_so(mover: Mover, device: Device) -> None:
    batch = save(0, 1)
    under_way: list[set[int]] = []
    device.during_gather = lambda: under_way.append(mover.copying([batch.batch_id, 999]))
    submit(mover, batch)
    assert [answer.batch_id for answer in answers(mover, Copied, 1)] == [batch.batch_id]
    assert under_way == [{batch.batch_id}]
    assert mover.copying([batch.batch_id]) == set()


def test_a_load_that_is_cancelled_keeps_off_the_device_however_long_its_tier_takes(
    mover: Mover, device: Device, disk: Held
) -> None:
    disk.gate.clear()
    reading, waiting = load(0, source=disk.name), load(1, source=disk.name)
    submit(mover, reading, waiting)
    assert disk.entered.wait(PATIENCE_S)
    mover.cancel_loads()
    mover.cancel_loads()
    assert not mover.is_at_device
    assert answers(mover, Cancelled, 2) == [Cancelled(reading.batch_id), Cancelled(waiting.batch_id)]
    disk.gate.set()
    assert {answer.batch_id for answer in answers(mover, Loaded, 2)} == {reading.batch_id, waiting.batch_id}
    assert device.waits == []


def test_what_is_being_copied_is_not_cancelled(mover: Mover, device: Device) -> None:
    begun, go_on = Event(), Event()

    def hold() -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)

    device.during_scatter = device.during_gather = hold
    for batch, kind in ((load(1), Loaded), (save(2), Copied)):
        begun.clear()
        go_on.clear()
        submit(mover, batch)
        assert begun.wait(PATIENCE_S)
        mover.cancel_loads()
        assert mover.is_at_device
        assert mover.poll() == []
        go_on.set()
        assert [answer.batch_id for answer in answers(mover, kind, 1)] == [batch.batch_id]
        assert not mover.is_at_device
