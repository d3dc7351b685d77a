"""The threads of a disk tier: whose work they do next."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from disk_forgetting_rig import WAIT_S
from disk_rig import opened
from gated_files import GatedFiles
from kvtier.testing.blocks import make_key, make_payload, summed
from kvtier.testing.contract import read_blocks
from kvtier.tiers.base import WriteStatus
from kvtier.tiers.disk.medium.files import OsFiles
from kvtier.tiers.disk.medium.io_threads import IoThreads
from pool_rig import BLUE, RED, until

RED_BYTES, BLUE_BYTES = 8192, 4096


def test_lines_take_turns_and_keep_their_order() -> None:
    threads, busy, gate, done = IoThreads(1, "test"), threading.Event(), threading.Event(), list[str]()

    def occupy() -> bool:
        busy.set()
        return gate.wait(WAIT_S)

    first = threads.submit(occupy, "red")
    assert busy.wait(WAIT_S)
    work = [
        threads.submit(lambda name=f"{line} {i}": done.append(name), line)  # type: ignore[misc]
        for line, number in (("red", 4), ("blue", 2), ("green", 1))
        for i in range(number)
    ]
    cancelled = threads.submit(lambda: done.append("cancelled"), "green")
    assert cancelled.cancel()
    gate.set()
    assert first.result(WAIT_S)
    for future in work:
        future.result(WAIT_S)
    threads.close()
    assert done == ["red 0", "blue 0", "green 0", "red 1", "blue 1", "red 2", "red 3"]


def test_a_read_waits_for_one_read_of_another_tenant_at_a_time(tmp_path: Path) -> None:
    """Red asks for eight blocks that are read one by one, from a tier with one thread; then blue asks for one."""

    lengths: list[int] = []

    class Noted(OsFiles):
        def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            lengths.append(sum(map(len, buffers)))
            return super().read(fd, buffers, offset)

    files = GatedFiles(Noted(direct=False))
    reds = [make_key(i, tenant=RED) for i in range(16)]
    blue = make_key("blue", tenant=BLUE)
    with opened(tmp_path / "disk", files=files, num_threads=1) as tier, ThreadPoolExecutor(2) as executor:
        tier.write([summed(key, make_payload(i, RED_BYTES)) for i, key in enumerate(reds)])
        assert tier.write([summed(blue, make_payload("blue", BLUE_BYTES))]) == [WriteStatus.STORED]
        files.begin()
        lengths.clear()
        files.may_read.clear()
        flood = executor.submit(read_blocks, tier, reds[::2], RED_BYTES)
        assert files.reading.acquire(timeout=WAIT_S)
        threads = tier._parts.threads[0]
        one = executor.submit(read_blocks, tier, [blue], BLUE_BYTES)
        until(lambda: BLUE in threads._lines)
        files.may_read.set()
        assert None not in flood.result(WAIT_S)
        assert one.result(WAIT_S) == [make_payload("blue", BLUE_BYTES)]
    assert len(lengths) == 9
    assert lengths.index(min(lengths)) <= 2
