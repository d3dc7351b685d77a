"""Clients of the pool's memory that are killed or stopped while they hold some of it, and a pool that is killed."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvtier.memory import memfd
from kvtier.testing.contract import make_key, make_payload, read_blocks, summed
from kvtier.tiers.base import Status, WriteStatus
from pool_rig import BLOCK_BYTES, WAIT_S, connect, held_bytes, items, keys, payloads, pool_process, until
from suspending import resume, suspend

pytestmark = pytest.mark.skipif(not memfd.available(), reason="shared memory needs Linux")
PAYLOADS = payloads(range(16))
KEYS = keys(range(16))
CHILD = """
import sys, time
sys.path.insert(0, {tests!r})
from kvtier.testing.contract import make_key
from kvtier.tiers.base import WriteStatus
from kvtier.protocol.block import Verb
from kvtier.protocol.groups import group
from pool_rig import BLOCK_BYTES, connect
tier = connect({address!r}, shared_memory=True)
memory = tier._transport.memory
deadline = time.monotonic() + 60
for i in range(100):
    lease, count = memory.acquire([make_key(i)], [BLOCK_BYTES], deadline)
    assert count == 1, (i, count)
    session, answer = memory._writes.ask(
        Verb.PREPARE, dict(groups=group([make_key(("new", i))], [BLOCK_BYTES]).fields), 1, deadline
    )
    assert answer.data("statuses") == b"\\0", i
print("holding", flush=True)
time.sleep(600)
"""


@contextmanager
def holding_client(address: str) -> Iterator["subprocess.Popen[str]"]:
    """A process that holds leases on blocks 0 to 99, and 100 prepared slots for others."""
    script = CHILD.format(tests=str(Path(__file__).parents[2] / "rigs"), address=address)
    client = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == "holding\n"
        yield client
    finally:
        client.kill()
        client.communicate(timeout=WAIT_S)


def test_kill_minus_9_of_a_client_gives_everything_back(tmp_path: Path) -> None:
    with (
        pool_process(listen=f"unix:{tmp_path}/pool.sock", memory="64MiB") as pool,
        closing(connect(pool.block, shared_memory=True)) as tier,
    ):
        assert tier.write(items(range(100))) == [WriteStatus.STORED] * 100
        with holding_client(pool.block) as client:
            assert held_bytes(pool) >= 200 * BLOCK_BYTES
            pending = [make_key(("new", i)) for i in range(100)]
            assert tier.lookup(pending) == [Status.PENDING] * 100
            client.kill()
            until(lambda: held_bytes(pool) == 0, within_s=5.0)  # before any lease is over
            assert tier.lookup(pending) == [Status.MISS] * 100
        new = [summed(key, make_payload(i, BLOCK_BYTES)) for i, key in enumerate(pending)]
        assert tier.write(new) == [WriteStatus.STORED] * 100
        assert read_blocks(tier, pending, BLOCK_BYTES) == [payload for _, payload, _ in new]
        assert read_blocks(tier, [make_key(i) for i in range(100)], BLOCK_BYTES) == [p for _, p, _ in items(range(100))]


def test_a_stopped_client_keeps_its_write_slots_and_nothing_of_it_is_used_again(tmp_path: Path) -> None:
    with (
        pool_process(listen=f"unix:{tmp_path}/pool.sock", memory="64MiB") as pool,
        closing(connect(pool.block, shared_memory=True)) as tier,
    ):
        tier.write(items(range(100)))
        with holding_client(pool.block) as client:
            suspend(client.pid)
            for start in range(1000, 4000, 100):  # three times the memory
                batch = items(range(start, start + 100))
                stored = [item for item, status in zip(batch, tier.write(batch), strict=True) if not status]
                assert read_blocks(tier, [key for key, _, _ in stored], BLOCK_BYTES) == [p for _, p, _ in stored]
            if held_bytes(pool) >= 200 * BLOCK_BYTES:  # else the leases were over before this had come to its end
                leased = items(range(100))
                assert read_blocks(tier, [key for key, _, _ in leased], BLOCK_BYTES) == [p for _, p, _ in leased]
            assert held_bytes(pool) >= 100 * BLOCK_BYTES
            assert tier.lookup([make_key(("new", i)) for i in range(100)]) == [Status.PENDING] * 100
            resume(client.pid)


def test_kill_minus_9_of_the_pool_is_misses_heals_by_itself_and_leaves_no_memory(tmp_path: Path) -> None:
    with (
        pool_process(listen=f"unix:{tmp_path}/pool.sock", memory="64MiB") as pool,
        closing(connect(pool.block, shared_memory=True)) as tier,
    ):
        tier.write(items(range(16)))
        assert read_blocks(tier, KEYS, BLOCK_BYTES) == PAYLOADS
        assert num_slabs() > 0
        pool.kill()
        until(lambda: num_slabs() == 0)  # without a call of ours: an idle engine must not keep a dead pool's memory
        assert read_blocks(tier, KEYS, BLOCK_BYTES) == [None] * 16
        restarted = pool.again()
        try:
            until(lambda: tier.write(items(range(1))) == [WriteStatus.STORED])
            assert read_blocks(tier, KEYS[:2], BLOCK_BYTES) == [PAYLOADS[0], None]
            assert num_slabs() > 0
        finally:
            restarted.kill()


def num_slabs() -> int:
    """Slabs of any pool that this process maps."""
    return sum("memfd:kvtier-slab" in line for line in Path("/proc/self/maps").read_text().splitlines())
