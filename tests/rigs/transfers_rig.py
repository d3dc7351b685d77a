"""Transfers that go on while the service at the other end is killed."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvtier.testing.blocks import make_key, read_blocks, summed
from kvtier.tiers.base import Item, Tier, WriteStatus

_WAIT_S = 30.0


def kill_during_transfers(tier: Tier, verb: str, blocks: Sequence[Item[bytes]], kill: Callable[[], None]) -> None:
    """Reads these blocks over and over, or writes others with their payloads; kills, and waits until all fails.

    What was answered before was right, and nothing that was read on the way is wrong.

    :param blocks: that `tier` has.
    """
    keys, payloads = [key for key, _, _ in blocks], [payload for _, payload, _ in blocks]
    answers: list[list[bytes | None] | list[WriteStatus]] = []
    some, stop = threading.Event(), threading.Event()
    fresh = iter(range(10**9))

    def transfer() -> list[bytes | None] | list[WriteStatus]:
        if verb == "read":
            return read_blocks(tier, keys, len(payloads[0]))
        return tier.write([summed(make_key(("new", next(fresh))), payload) for payload in payloads])

    def keep_on() -> None:
        while not stop.is_set():
            answers.append(transfer())
            some.set()

    failed = [None if verb == "read" else WriteStatus.FAILED] * len(blocks)
    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(keep_on)
        try:
            assert some.wait(_WAIT_S)
            kill()
            deadline = time.monotonic() + _WAIT_S
            while answers[-1] != failed:
                assert time.monotonic() < deadline, "transfers go on without a service"
                time.sleep(0.01)
        finally:
            stop.set()
        running.result(_WAIT_S)
    assert failed not in answers[:1]
    if verb == "read":
        assert all(
            block in (None, payload) for answer in answers for block, payload in zip(answer, payloads, strict=True)
        )
