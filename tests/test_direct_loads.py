"""Blocks from the pool's memory straight to the device: real pools and tier processes, and what may happen to both."""

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pytest
from prometheus_client import CollectorRegistry

from build_rig import NAMESPACE, TOKEN, build, result
from hierarchy_rig import chain
from kvtier.build import EngineCache
from kvtier.config import token_sha256
from kvtier.hierarchy import JobResult
from kvtier.keys import BlockKey, rank_keys
from kvtier.testing.blocks import make_key
from kvtier.tiers import memfd
from kvtier.tiers.aside import Borrower, borrowing
from kvtier.tiers.aside import child as child_module
from kvtier.tiers.lending import SlotMemory
from kvtier.transfer import Arena, Blocks, HostMemoryKV
from kvtier.wire.stream import PlainStream
from kvtier_pool.settings import PoolLimits
from pool_rig import MIB, TENANTS, WAIT_S, connect, held_bytes, pool_process, running_pool, until
from suspending import resume, suspend

pytestmark = pytest.mark.skipif(not memfd.available(), reason="shared memory needs Linux")
BLOCK_BYTES = 64 * 1024
NUM_BLOCKS = 16
KEYS = chain(NUM_BLOCKS)
Rows = npt.NDArray[np.uint8]


class Device(HostMemoryKV):
    """Notes where blocks come from. Copies of lent ones wait for `gate`."""

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows)
        self.rows = rows
        self.num_lent = self.num_by_arena = 0
        self.attached: list[SlotMemory] = []
        self.can_attach = True
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()

    def scatter_all(self, sources: Sequence[Blocks]) -> None:
        if any(isinstance(blocks.memory, Arena) for blocks in sources):
            self.num_by_arena += sum(len(blocks.slots) for blocks in sources)
        else:
            assert all(blocks.memory in self.attached for blocks in sources)
            self.entered.set()
            assert self.gate.wait(WAIT_S)
            self.num_lent += sum(len(blocks.slots) for blocks in sources)
        super().scatter_all(sources)

    def attach(self, memory: SlotMemory) -> bool:
        if self.can_attach:
            self.attached.append(memory)
        return self.can_attach

    def detach(self, memory: SlotMemory) -> None:
        self.attached.remove(memory)


class Engine:
    """An engine's cache over a `Device`."""

    def __init__(self, cache: EngineCache, device: Device, registry: CollectorRegistry) -> None:
        self.cache, self.device, self._registry = cache, device, registry

    def save(self) -> Rows:
        """All blocks to the pool; returns what they hold."""
        saved = self.device.rows.copy()
        assert not result(self.cache.hierarchy, self.start_save()).failed
        until(lambda: self.num_stored() >= NUM_BLOCKS)
        return saved

    def num_stored(self) -> float:
        """Blocks that the pool has taken from this engine."""
        return self.count("kvtier_tier_blocks_total", tier="pool", op="write", status="stored")

    def start_save(self) -> int | None:
        return self.cache.hierarchy.start_save(list(zip(KEYS, range(NUM_BLOCKS), strict=True)))

    def start_load(self) -> int:
        """To other slots than they were saved from."""
        self.device.rows[:] = 0
        self.device.num_lent = self.device.num_by_arena = 0
        return self.cache.hierarchy.start_load([(key, NUM_BLOCKS - 1 - i) for i, key in enumerate(KEYS)])

    def finish(self, job_id: int) -> JobResult:
        return result(self.cache.hierarchy, job_id)

    def load(self) -> JobResult:
        return self.finish(self.start_load())

    def load_from_pool(self) -> JobResult:
        self.cache.hierarchy.reset()
        return self.load()

    def load_blocks(self, blocks: Sequence[tuple[BlockKey, int]]) -> JobResult:
        """From the pool."""
        self.cache.hierarchy.reset()
        return self.finish(self.cache.hierarchy.start_load(blocks))

    def load_into_gate(self) -> int:
        """A load whose copy has begun, and waits for the device's gate."""
        self.cache.hierarchy.reset()
        self.device.gate.clear()
        self.device.entered.clear()
        job_id = self.start_load()
        assert self.device.entered.wait(WAIT_S)
        return job_id

    def get_ready(self) -> None:
        """Until the pool's memory is mapped here: loads until all is lent."""

        def is_lent() -> bool:
            loaded = self.load_from_pool()
            return self.device.num_lent == NUM_BLOCKS and not loaded.failed

        until(is_lent)

    def count(self, name: str, **labels: str) -> float:
        return self._registry.get_sample_value(name, labels) or 0.0


@contextlib.contextmanager
def engine(folder: Path, address: str, *, seed: int = 0, **pool: Any) -> Iterator[Engine]:
    rows = np.random.default_rng(seed).integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    device, registry = Device(rows), CollectorRegistry()
    cache = {"tokens_per_block": 1, "load_threads": 2, "load_deadline_s": WAIT_S}
    with build(folder, device, registry=registry, pool={"address": address, **pool}, cache=cache) as built:
        yield Engine(built, device, registry)
    assert device.attached == [], "all is given back"


@pytest.fixture(autouse=True)
def tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TENANTS, token_sha256(TOKEN), "red")


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with running_pool(64 * MIB, listen=(f"unix:{tmp_path}/pool.sock",)) as pool:
        yield pool.block[0]


def is_right(engine: Engine, saved: Rows, loaded: JobResult) -> bool:
    """Whether what came is what was saved, and only that came."""
    rows = engine.device.rows[::-1]
    return all(np.array_equal(rows[i], saved[i]) for i in range(NUM_BLOCKS) if i not in loaded.failed)


def test_blocks_come_from_where_they_lie(address: str, tmp_path: Path) -> None:
    with engine(tmp_path, address) as writer, engine(tmp_path, address) as reader:
        saved = writer.save()
        first = reader.load()
        assert first.tiers == ("pool",) * NUM_BLOCKS
        assert is_right(reader, saved, first)
        assert reader.device.num_by_arena == NUM_BLOCKS, "memory that is not mapped yet is not waited for"
        reader.get_ready()
        assert not reader.cache.hierarchy.holds(KEYS[0]), "it took no slot of host memory"
        before = {
            name: reader.count(name, **labels)
            for name, labels in (
                ("kvtier_tier_bytes_total", {"tier": "pool", "op": "read"}),
                ("kvtier_tier_blocks_total", {"tier": "pool", "op": "read", "status": "hit"}),
            )
        }
        again = reader.load()
        assert again.tiers == ("pool",) * NUM_BLOCKS
        assert is_right(reader, saved, again)
        assert (reader.device.num_lent, reader.device.num_by_arena) == (NUM_BLOCKS, 0)
        gained = reader.count("kvtier_tier_bytes_total", tier="pool", op="read") - before["kvtier_tier_bytes_total"]
        assert gained == NUM_BLOCKS * BLOCK_BYTES
        hits = reader.count("kvtier_tier_blocks_total", tier="pool", op="read", status="hit")
        assert hits - before["kvtier_tier_blocks_total"] == NUM_BLOCKS
        assert reader.count("kvtier_tier_blocks_total", tier="pool", op="lend", status="hit") > 0
        assert reader.count("kvtier_tier_batch_seconds_count", tier="pool", op="lend") > 0


@pytest.mark.parametrize("pool", [{"direct_loads": False}, {"shared_memory": False}])
def test_it_can_be_switched_off(pool: dict[str, bool], address: str, tmp_path: Path) -> None:
    with engine(tmp_path, address, **pool) as only:
        saved = only.save()
        for _ in range(3):
            assert is_right(only, saved, only.load_from_pool())
            assert only.device.num_by_arena == NUM_BLOCKS
        assert only.device.attached == []


def test_a_device_that_cannot_copy_from_there(address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with engine(tmp_path, address) as only:
        saved = only.save()
        only.device.can_attach = False
        for _ in range(2):
            only.load_from_pool()
        until(lambda: "cannot copy from its memory" in caplog.text)
        for _ in range(3):
            loaded = only.load_from_pool()
            assert not loaded.failed
            assert is_right(only, saved, loaded)
        assert only.device.num_lent == 0
    assert caplog.text.count("cannot copy from its memory") == 1


@pytest.fixture
def two_slabs(address: str, tmp_path: Path) -> Iterator[list[tuple[BlockKey, int]]]:
    """Half of the blocks in the slab of one writer, half in that of another; each by the place where they were."""
    with engine(tmp_path, address) as first, engine(tmp_path, address) as second:
        strange = chain(NUM_BLOCKS, seed=9)
        for writer, keys in ((first, KEYS), (second, strange)):
            job_id = writer.cache.hierarchy.start_save(list(zip(keys, range(NUM_BLOCKS), strict=True)))
            assert not result(writer.cache.hierarchy, job_id).failed
        until(lambda: all(writer.num_stored() >= NUM_BLOCKS for writer in (first, second)))
        yield [(key, i) for i, key in enumerate([*KEYS[: NUM_BLOCKS // 2], *strange[NUM_BLOCKS // 2 :]])]


def test_a_device_that_refuses_is_not_asked_again(
    two_slabs: list[tuple[BlockKey, int]], address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(tmp_path, address) as only:
        only.device.can_attach = False
        until(lambda: bool(only.load_blocks(two_slabs)) and "cannot copy from its memory" in caplog.text)
    assert caplog.text.count("cannot copy from its memory") == 1


def test_what_is_lent_while_the_device_refuses_more_is_given_back(
    two_slabs: list[tuple[BlockKey, int]], address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(tmp_path, address) as only:
        only.get_ready()
        job_id = only.load_into_gate()
        only.device.can_attach = False
        others = two_slabs[NUM_BLOCKS // 2 :]
        until(lambda: bool(only.load_blocks(others)) and "cannot copy from its memory" in caplog.text)
        assert only.device.attached, "it is being copied from"
        only.device.gate.set()
        assert not only.finish(job_id).failed
        until(lambda: not only.device.attached)


def test_memory_is_lent_while_more_is_made_ready(
    two_slabs: list[tuple[BlockKey, int]], address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(borrowing, "_TICK_S", 0.0)
    with engine(tmp_path, address) as only:
        may_attach, attach = threading.Event(), only.device.attach

        def one_and_wait(memory: SlotMemory) -> bool:
            assert not only.device.attached or may_attach.wait(WAIT_S)
            return attach(memory)

        def num_lent() -> int:
            before = only.device.num_lent
            assert not only.load_blocks(two_slabs).failed
            return only.device.num_lent - before

        monkeypatch.setattr(only.device, "attach", one_and_wait)
        until(lambda: num_lent() == NUM_BLOCKS // 2)
        may_attach.set()
        until(lambda: num_lent() == NUM_BLOCKS)


def test_a_device_that_fails_in_the_middle_of_getting_ready(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(tmp_path, address) as only:
        saved, attach = only.save(), only.device.attach

        def fail(memory: SlotMemory) -> bool:
            attach(memory)
            raise RuntimeError("CUDA error: out of memory")

        monkeypatch.setattr(only.device, "attach", fail)
        until(lambda: bool(only.load_from_pool()) and "lends nothing any more" in caplog.text)
        assert is_right(only, saved, only.load_from_pool())
        assert only.device.attached == []


def test_what_the_pool_has_not_in_memory_comes_by_the_arena(tmp_path: Path) -> None:
    settings = {"disk_dir": tmp_path / "disk", "disk_bytes": 64 * MIB, "disk_reserve_bytes": 0}
    listen = (f"unix:{tmp_path}/pool.sock",)
    with running_pool(64 * MIB, listen=listen, **settings) as pool, engine(tmp_path, pool.block[0]) as writer:
        saved = writer.save()
    with running_pool(64 * MIB, listen=listen, **settings) as pool, engine(tmp_path, pool.block[0]) as reader:
        loaded = reader.load()
        assert loaded.tiers == ("pool",) * NUM_BLOCKS
        assert is_right(reader, saved, loaded)
        reader.get_ready()


def test_a_block_that_is_missing_fails_alone(address: str, tmp_path: Path) -> None:
    with engine(tmp_path, address) as only:
        saved = only.save()
        only.get_ready()
        only.device.rows[:] = 0
        only.cache.hierarchy.reset()
        strange = chain(1, seed=9)
        blocks = [*((key, NUM_BLOCKS - 1 - i) for i, key in enumerate(KEYS[:-1])), (strange[0], 0)]
        loaded = only.finish(only.cache.hierarchy.start_load(blocks))
        assert loaded.failed == {NUM_BLOCKS - 1}
        assert is_right(only, saved, loaded)


def test_a_cancelled_load_keeps_its_slots_until_the_copy_is_over(address: str, tmp_path: Path) -> None:
    with engine(tmp_path, address) as only:
        only.save()
        only.get_ready()
        job_id = only.load_into_gate()
        only.cache.hierarchy.cancel(job_id)
        assert only.cache.hierarchy.poll() == [], "its device slots are being written"
        only.device.gate.set()
        loaded = only.finish(job_id)
        assert loaded.failed in (frozenset(), frozenset(range(NUM_BLOCKS)))
        only.cache.hierarchy.check()


def test_a_cancelled_load_does_not_come_by_the_arena_instead(tmp_path: Path) -> None:
    """Although what was lent has come to nothing."""
    limits = PoolLimits(lease_s=0.2)
    listen = (f"unix:{tmp_path}/pool.sock",)
    with running_pool(64 * MIB, listen=listen, limits=limits) as pool, engine(tmp_path, pool.block[0]) as only:
        only.save()
        only.get_ready()
        job_id = only.load_into_gate()
        only.cache.hierarchy.cancel(job_id)
        until(lambda: held_bytes(pool) == 0)
        only.device.gate.set()
        assert len(only.finish(job_id).failed) == NUM_BLOCKS
        assert only.device.num_by_arena == 0


def test_a_lease_that_is_over_and_slots_with_other_blocks(tmp_path: Path) -> None:
    """The reader hangs in its copy for longer than its lease. The pool gives the slots to others: bytes of which the
    reader's device gets, and must not use."""
    limits = PoolLimits(lease_s=0.2, max_held_bytes=64 * MIB)
    listen = (f"unix:{tmp_path}/pool.sock",)
    with running_pool(2 * MIB, listen=listen, limits=limits) as pool, engine(tmp_path, pool.block[0]) as reader:
        saved = reader.save()
        reader.get_ready()
        job_id = reader.load_into_gate()
        until(lambda: held_bytes(pool) == 0)
        with engine(tmp_path, pool.block[0], seed=1) as other:
            for label in range(1, 5):
                blocks = list(zip(chain(NUM_BLOCKS, seed=label), range(NUM_BLOCKS), strict=True))
                result(other.cache.hierarchy, other.cache.hierarchy.start_save(blocks))
            until(lambda: other.num_stored() >= 4 * NUM_BLOCKS)
        reader.device.gate.set()
        loaded = reader.finish(job_id)
        assert reader.device.num_lent == NUM_BLOCKS, "they were copied"
        assert loaded.failed, "and are not what was asked for, nor has the pool them any more"
        assert is_right(reader, saved, loaded)


def test_a_pool_that_is_killed(tmp_path: Path) -> None:
    """Its memory is given back although nobody asks for anything. Another one is used like the first."""
    listen = f"unix:{tmp_path}/pool.sock"
    red = f"--tenant=red={token_sha256(TOKEN)}"
    with pool_process(red, listen=listen) as pool, engine(tmp_path, pool.block) as only:
        saved = only.save()
        only.get_ready()
        assert only.device.attached
        pool.kill()
        until(lambda: not only.device.attached)
        loaded = only.load_from_pool()
        assert len(loaded.failed) == NUM_BLOCKS
        with pool_process(red, listen=listen) as another:
            until(lambda: comes_back(only, saved))
            only.get_ready()
            assert is_right(only, saved, only.load())
            another.kill()


def comes_back(engine: Engine, saved: Rows) -> bool:
    """Whether the pool takes the blocks and has them: the breaker may be open at first."""
    engine.device.rows[:] = saved
    engine.cache.hierarchy.reset()
    result(engine.cache.hierarchy, engine.start_save())
    return not engine.load_from_pool().failed


def test_a_pool_that_is_killed_in_the_middle_of_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory stays mapped until the copy is over."""
    has_ended, give_up = threading.Event(), Borrower._give_up

    def noted(borrower: Borrower, serials: Sequence[int]) -> None:
        give_up(borrower, serials)
        if serials:
            has_ended.set()

    monkeypatch.setattr(Borrower, "_give_up", noted)
    red = f"--tenant=red={token_sha256(TOKEN)}"
    with pool_process(red, listen=f"unix:{tmp_path}/pool.sock") as pool, engine(tmp_path, pool.block) as only:
        saved = only.save()
        only.get_ready()
        job_id = only.load_into_gate()
        pool.kill()
        assert has_ended.wait(WAIT_S)
        assert only.device.attached
        only.device.gate.set()
        loaded = only.finish(job_id)
        assert is_right(only, saved, loaded)
        until(lambda: not only.device.attached)


def test_a_tier_process_that_is_killed_in_the_middle_of_a_copy(address: str, tmp_path: Path) -> None:
    """What it had lent counts if it is still in place; the next one lends again."""
    with engine(tmp_path, address) as only:
        saved = only.save()
        only.get_ready()
        job_id = only.load_into_gate()
        (child,) = psutil.Process().children()
        child.kill()
        only.device.gate.set()
        assert is_right(only, saved, only.finish(job_id))
        only.get_ready()
        assert is_right(only, saved, only.load())


def test_slots_that_were_given_away_because_the_tier_process_was_killed(tmp_path: Path) -> None:
    """The lease would run on for long, but nobody holds it any more."""
    limits = PoolLimits(lease_s=60.0, max_held_bytes=64 * MIB)
    listen = (f"unix:{tmp_path}/pool.sock",)
    with running_pool(2 * MIB, listen=listen, limits=limits) as pool, engine(tmp_path, pool.block[0]) as reader:
        saved = reader.save()
        reader.get_ready()
        job_id = reader.load_into_gate()
        (child,) = psutil.Process().children()
        child.kill()
        until(lambda: held_bytes(pool) == 0)
        with contextlib.closing(connect(pool.block[0], token=TOKEN, shared_memory=True)) as other:
            for label in range(64):
                other.write([(make_key(label), bytes(BLOCK_BYTES))])
            reader.device.gate.set()
            loaded = reader.finish(job_id)
        assert reader.device.num_lent == NUM_BLOCKS, "they were copied"
        assert loaded.failed
        assert is_right(reader, saved, loaded)


def test_an_engine_without_a_descriptor_for_a_slab(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier process is not ended for it, and is asked again."""
    refused = threading.Event()

    def none_left(stream: PlainStream) -> int | None:
        descriptor = take(stream)
        if descriptor is not None:
            refused.set()
            os.close(descriptor)
        return None

    take = PlainStream.take_descriptor
    with engine(tmp_path, address) as only, monkeypatch.context() as patched:
        saved = only.save()
        (child,) = psutil.Process().children()
        patched.setattr(child_module, "PlainStream", type("Full", (PlainStream,), {"take_descriptor": none_left}))
        until(lambda: is_right(only, saved, only.load_from_pool()) and refused.is_set())
        patched.undo()
        only.get_ready()
        assert psutil.Process().children() == [child]
        assert is_right(only, saved, only.load())


def test_a_pool_that_hangs_holds_up_a_load_by_a_second(tmp_path: Path) -> None:
    red = f"--tenant=red={token_sha256(TOKEN)}"
    listen = f"unix:{tmp_path}/pool.sock"
    with (
        pool_process(red, listen=listen) as pool,
        engine(tmp_path, pool.block, call_timeout_s=2.0, connect_timeout_s=1.0) as only,
    ):
        saved = only.save()
        only.get_ready()
        suspend(pool.process.pid)
        try:
            assert len(only.load_from_pool().failed) == NUM_BLOCKS
        finally:
            resume(pool.process.pid)
        until(lambda: not only.load_from_pool().failed)
        assert is_right(only, saved, only.load_from_pool())


def test_memory_that_the_pool_drops_is_not_kept(address: str, tmp_path: Path) -> None:
    """A slab that is empty, and whose writer has gone. The reader asks for nothing meanwhile."""
    with engine(tmp_path, address) as reader:
        with engine(tmp_path, address) as writer:
            writer.save()
            reader.get_ready()
            assert reader.device.attached
        with contextlib.closing(connect(address, token=TOKEN)) as tier:
            assert tier.discard(rank_keys(KEYS, NAMESPACE.id)) == NUM_BLOCKS
        until(lambda: not reader.device.attached)
