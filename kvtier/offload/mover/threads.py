"""The threads of a mover: a slow tier holds up nobody else, and no copy waits for checksums."""

from collections.abc import Iterable

from kvtier.system.started_threads import started_threads

_HOST_LOADS, _SAVES = 2, 2
"""Threads for copies from and to the arena: one asks for a batch's transfers while those of another are under way."""
OTHER_COPIES = _HOST_LOADS + _SAVES
"""How many copies a mover has under way at a time, beside one per thread that loads from tiers."""


class Threads:
    """Queues of work with their threads. Each is set once; any thread may queue work in any of them until `close`."""

    def __init__(self, tiers: Iterable[str], *, num_load_threads: int) -> None:
        """
        :param tiers: names of the tiers that are written.
        :param num_load_threads: batches that are loaded from tiers at a time.
        :raises UnavailableError: the process may not have so many threads.
        """
        self.loads = started_threads(num_load_threads, "kvtier-load")
        """Reads from tiers, and copies of what was read to the device."""
        self.host_loads = started_threads(_HOST_LOADS, "kvtier-load-host")
        """Copies of what is in the arena already, which never wait for a tier."""
        self.saves = started_threads(_SAVES, "kvtier-copy")
        """Copies from the device to the arena, begun in order."""
        self.sums = started_threads(1, "kvtier-checksum")
        """Checksums, between copies and writers: blocks for several tiers are summed once."""
        self.writers = {name: started_threads(1, f"kvtier-write-{name}") for name in tiers}
        """The writer of each tier, by the tier's name. What it is given is done in order."""

    def close(self) -> None:
        """Waits until all work is done, with the work that it queues in turn, and ends the threads. Idempotent."""
        # From the first to the last stage: each may still queue work in the next one.
        for executor in (self.loads, self.host_loads, self.saves, self.sums, *self.writers.values()):
            executor.shutdown(cancel_futures=False)
