"""What the mover's copies wait for, and whose time that is."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
from kvtier.offload.mover import copy_queue


class Device(HostMemoryKV):
    """Notes which fence each copy waits for. One to it takes `copy_s` by `clock`, of which it waits for `waited_s`."""

    def __init__(self) -> None:
        super().__init__(np.zeros((16, BLOCK_BYTES), dtype=np.uint8))
        self.fences: list[Fence] = []
        self.waits: list[tuple[str, Fence | None]] = []
        self.moved: list[list[int]] = []
        """The device slots of each copy."""
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
        self.waits.append(("save", after))
        self.during_gather()
        self.moved.append(list(device_slots))
        super().gather(device_slots, arena, arena_slots, after=after)

    def scatter_all(self, sources: Sequence[Blocks], *, after: Fence | None) -> float:
        self.waits.append(("load", after))
        self.during_scatter()
        self.moved.append([slot for blocks in sources for slot in blocks.device_slots])
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


@contextmanager
def held(device: Device) -> Iterator[None]:
    """Copies wait until the end."""
    go_on = Event()
    device.during_gather = device.during_scatter = lambda: until(lambda: go_on.is_set() or None)
    try:
        yield
    finally:
        go_on.set()


def test_batches_of_a_step_wait_for_one_fence(mover: Mover, device: Device) -> None:
    submit(mover, save(0, 1), save(2), load(3), load(4))
    answers(mover, Loaded, 2)
    submit(mover, save(5))
    mover.close()
    assert len(device.fences) == 2
    first, second = device.fences
    assert set(device.waits[:-1]) == {("save", first), ("load", first)}
    assert device.waits[-1] == ("save", second)


@pytest.mark.parametrize(("make", "kind", "answer"), [(save, "save", Copied), (load, "load", Loaded)])
def test_batches_behind_one_fence_are_copied_together(
    mover: Mover, device: Device, make: Callable[..., SaveBatch | LoadBatch], kind: str, answer: type
) -> None:
    """Both threads for copies of this kind are busy while four steps hand in six batches."""
    busy, together = [make(0), make(1)], [[make(2), make(3)], [make(4)], [make(5), make(6, 7)]]
    with held(device):
        for batch in busy:
            submit(mover, batch)
        until(lambda: len(device.waits) == len(busy) or None)
        for of_step in together:
            submit(mover, *of_step)
    expected = sorted(batch.batch_id for batch in itertools.chain(busy, *together))
    assert sorted(found.batch_id for found in answers(mover, answer, len(expected))) == expected
    assert device.waits == [(kind, fence) for fence in device.fences]
    assert sorted(device.moved) == [[0], [1], [2, 3], [4], [5, 6, 7]]


def test_a_copy_of_several_batches_has_an_end(mover: Mover, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_queue, "_MOST_BYTES", 3 * BLOCK_BYTES)
    with held(device):
        for batch in (save(0), save(1)):
            submit(mover, batch)
        until(lambda: len(device.waits) == 2 or None)
        submit(mover, save(2, 3), save(4), save(5), save(6, 7, 8, 9), save(10))
    answers(mover, Copied, 7)
    assert sorted(device.moved) == [[0], [1], [2, 3, 4], [5], [6, 7, 8, 9], [10]]


def test_batches_that_wait_for_no_fence_are_copied_one_by_one(
    mover: Mover, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "fence", lambda: None)
    with held(device):
        submit(mover, save(0), save(1))
        until(lambda: len(device.waits) == 2 or None)
        submit(mover, save(2), save(3))
    answers(mover, Copied, 4)
    assert sorted(device.moved) == [[0], [1], [2], [3]]


def test_of_loads_that_go_together_a_cancelled_one_keeps_off_the_device(mover: Mover, device: Device) -> None:
    kept, cancelled = load(2), load(3)
    with held(device):
        for batch in (load(0), load(1)):
            submit(mover, batch)
        until(lambda: len(device.waits) == 2 or None)
        submit(mover, kept, cancelled, CancelBatch(cancelled.batch_id))
    assert len(answers(mover, Loaded, 4)) == 4
    assert sorted(device.moved) == [[0], [1], [2]]


def test_loads_that_go_together_share_the_time(mover: Mover, device: Device) -> None:
    one, three = load(2), load(3, 4, 5)
    with ExitStack() as until_the_others_are_there:
        with held(device):
            for batch in (load(0), load(1)):
                submit(mover, batch)
            until(lambda: len(device.waits) == 2 or None)
            until_the_others_are_there.enter_context(held(device))
            submit(mover, one, three)
        answers(mover, Loaded, 2)
        device.copy_s = 8.0
    found = {loaded.batch_id: loaded.seconds for loaded in answers(mover, Loaded, 2)}
    assert found == {one.batch_id: 2.0, three.batch_id: 6.0}


def test_a_copy_that_fails_fails_for_all_that_went_with_it(
    mover: Mover, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("the device is gone")

    with held(device):
        submit(mover, save(0), load(1))
        submit(mover, save(2), load(3))
        until(lambda: len(device.waits) == 4 or None)
        submit(mover, save(4), save(5), load(6), load(7, 8))
        device.during_gather = device.during_scatter = fail
    found = answers(mover, Copied | Loaded, 8)
    assert sorted(bytes(each.ok) for each in found if not all(each.ok)) == [b"\0", b"\0", b"\0", b"\0\0"]
    assert caplog.text.count("the device is gone") >= 2


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
