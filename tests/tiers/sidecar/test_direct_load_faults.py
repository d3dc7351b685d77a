"""Blocks from the pool's memory straight to the device, while pools and tier processes are killed and stopped."""

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from build_rig import result
from direct_rig import BLOCK_BYTES, NUM_BLOCKS, Engine, Rows, engine, is_right
from kvtier.memory import memfd
from kvtier.net.stream import PlainStream
from kvtier.testing.blocks import make_key, summed
from kvtier.tiers.sidecar import DirectReads
from kvtier.tiers.sidecar import child as child_module
from kvtier_pool.limits import PoolLimits
from pool_rig import MIB, WAIT_S, connect, held_bytes, pool_process, running_pool, until
from suspending import resume, suspend

pytestmark = pytest.mark.skipif(not memfd.available(), reason="shared memory needs Linux")


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with running_pool(64 * MIB, listen=(f"unix:{tmp_path}/pool.sock",)) as pool:
        yield pool.block[0]


@pytest.mark.parametrize("lease_s", [0.2, 60.0], ids=["lease over", "tier process killed"])
def test_slots_that_were_given_away_in_the_middle_of_a_copy(lease_s: float, tmp_path: Path) -> None:
    """The reader's device gets other blocks' bytes, and must not use them."""
    limits = PoolLimits(lease_s=lease_s, max_held_bytes=64 * MIB)
    listen = (f"unix:{tmp_path}/pool.sock",)
    # A load of 1 MiB is lent in two parts, each an eighth of what one of two tenants may hold, a quarter of the memory.
    with running_pool(20 * MIB, listen=listen, limits=limits) as pool, engine(tmp_path, pool.block[0]) as reader:
        saved = reader.save()
        reader.get_ready()
        job_id = reader.load_into_gate()
        if lease_s > WAIT_S:
            (child,) = psutil.Process().children()
            child.kill()
        until(lambda: held_bytes(pool) == 0)
        with contextlib.closing(connect(pool.block[0], shared_memory=True)) as other:
            for first in range(0, 20 * MIB // BLOCK_BYTES, NUM_BLOCKS):
                labels = range(first, first + NUM_BLOCKS)
                other.write([summed(make_key(label), bytes(BLOCK_BYTES)) for label in labels])
            reader.device.gate.set()
            loaded = reader.finish(job_id)
        assert reader.device.num_leased == NUM_BLOCKS, "they were copied"
        assert loaded.failed, "and are not what was asked for, nor has the pool them any more"
        assert is_right(reader, saved, loaded)


def test_a_pool_that_is_killed(tmp_path: Path) -> None:
    """Its memory is given back although nobody asks for anything. Another one is used like the first."""
    listen = f"unix:{tmp_path}/pool.sock"
    with pool_process(listen=listen) as pool, engine(tmp_path, pool.block) as only:
        saved = only.save()
        only.get_ready()
        assert only.device.attached
        pool.kill()
        until(lambda: not only.device.attached)
        loaded = only.load_from_pool()
        assert len(loaded.failed) == NUM_BLOCKS
        with pool_process(listen=listen) as another:
            until(lambda: comes_back(only, saved))
            only.get_ready()
            assert is_right(only, saved, only.load())
            another.kill()


def comes_back(engine: Engine, saved: Rows) -> bool:
    """Whether the pool takes the blocks and has them. The breaker may be open at first, or a save before this one not
    be over, and then nothing is saved."""
    engine.device.rows[:] = saved
    engine.cache.hierarchy.reset()
    if (job_id := engine.start_save()) is None:
        return False
    result(engine.cache.hierarchy, job_id)
    return not engine.load_from_pool().failed


def test_a_pool_that_is_killed_in_the_middle_of_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory stays mapped until the copy is over."""
    has_ended, give_up = threading.Event(), DirectReads._give_up

    def noted(direct_reads: DirectReads, serials: Sequence[int]) -> None:
        give_up(direct_reads, serials)
        if serials:
            has_ended.set()

    monkeypatch.setattr(DirectReads, "_give_up", noted)
    with pool_process(listen=f"unix:{tmp_path}/pool.sock") as pool, engine(tmp_path, pool.block) as only:
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


def test_a_pool_that_hangs_holds_up_a_load_by_its_deadline(tmp_path: Path) -> None:
    listen = f"unix:{tmp_path}/pool.sock"
    with (
        pool_process(listen=listen) as pool,
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
