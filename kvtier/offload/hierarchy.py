"""Both halves in one process: what an engine with one scheduler and one worker talks to."""

from collections.abc import Sequence

from kvtier.clock import MONOTONIC, Clock
from kvtier.identity.keys import BlockKey
from kvtier.offload.changes import ContentChanges
from kvtier.offload.directory import Directory
from kvtier.offload.jobs import Block, JobResult
from kvtier.offload.metrics import HierarchyMetrics
from kvtier.offload.mover import Mover
from kvtier.offload.planner import BlockStatus, Planner
from kvtier.offload.previous import PreviousKeys


class Hierarchy:
    """A directory and its only mover. Scheduler thread only; nothing blocks but `wait` and `close`.

    When a call that starts or ends a job returns, the mover has been told. That is why callers are not given the
    directory itself, although some methods only forward to it: a job that is started there waits until the next pump.
    """

    def __init__(
        self,
        directory: Directory,
        mover: Mover,
        planner: Planner,
        metrics: HierarchyMetrics,
        *,
        settle_s: float = 10.0,
        clock: Clock = MONOTONIC,
    ) -> None:
        """Takes over directory and mover.

        :param settle_s: how long `close` may take to start writing down what `write_back` owes.
        """
        self._directory, self._mover, self._planner, self._metrics = directory, mover, planner, metrics
        self._settle_s, self._clock = settle_s, clock
        self._pump()

    def start_lookup(self, keys: Sequence[BlockKey], previous: Sequence[PreviousKeys] = ()) -> int:
        """Asks where these blocks are and returns the ticket for `poll_lookup`, as `Directory.start_lookup` does."""
        self._pump()
        return self._directory.start_lookup(keys, previous)

    def poll_lookup(self, ticket: int) -> list[BlockStatus] | None:
        """Returns a status per key, in order, which ends the ticket; None while the shared tier is being asked."""
        return self._directory.poll_lookup(ticket)

    def cancel_lookup(self, ticket: int) -> None:
        """Ends the ticket of a lookup without an answer."""
        self._directory.cancel_lookup(ticket)

    def plan_fetch(self, statuses: Sequence[BlockStatus], num_computed: int | None = None) -> int:
        """Returns how many leading blocks are worth fetching, as `Planner.blocks_to_fetch` does."""
        return self._planner.blocks_to_fetch(statuses, num_computed)

    def note_computed(self, num_blocks: float, seconds: float) -> None:
        """Notes what computing took, against which the planner weighs fetching."""
        self._directory.speeds.note_computed(num_blocks, seconds)

    def start_load(self, blocks: Sequence[Block], *, by_layer: bool = False) -> int:
        """Begins to bring blocks to device slots and returns the job's id, as `Directory.start_load` does."""
        job_id = self._directory.start_load(blocks, by_layer=by_layer)
        self._pump()
        return job_id

    def start_save(self, blocks: Sequence[Block]) -> int | None:
        """Begins to copy blocks from device slots to the arenas and below, as `Directory.start_save` does."""
        job_id = self._directory.start_save(blocks)
        self._pump()
        return job_id

    def save_full(self, blocks: Sequence[Block]) -> int | None:
        """Notes that blocks became full and saves those that the policy wants now, as `Directory.save_full` does."""
        job_id = self._directory.save_full(blocks)
        self._pump()
        return job_id

    def note_hits(self, blocks: Sequence[Block]) -> int | None:
        """Notes hits of blocks on the device and saves those that are now worth it, as `Directory.note_hits` does."""
        job_id = self._directory.note_hits(blocks)
        self._pump()
        return job_id

    def worth_saving(self, key: BlockKey) -> bool:
        """Returns whether a block that the device is about to lose should be copied before."""
        return self._directory.worth_saving(key)

    def reset(self) -> None:
        """Forgets every block in the arenas and in the tiers that belong to the movers, as `Directory.reset` does."""
        self._pump()
        self._directory.reset()
        self._pump()

    def cancel(self, job_id: int) -> None:
        """Asks for the end of a load; its result follows as soon as the movers keep off its slots."""
        self._directory.cancel(job_id)
        self._pump()

    def poll(self) -> list[JobResult]:
        """Returns the jobs that ended since the last poll."""
        self._pump()
        results = self._directory.poll()
        self._pump()
        return results

    def wait(self, timeout_s: float) -> None:
        """Blocks until a poll is worth while, at most `timeout_s`: for an engine that has nothing else to do.

        Ends with the answer to a lookup or a transfer, and with `nudge`.
        """
        self._mover.wait(timeout_s)

    def nudge(self) -> None:
        """Ends the present `wait`, or else the next one. Any thread."""
        self._mover.nudge()

    def holds(self, key: BlockKey) -> bool:
        """Whether host memory has this block or is just being given it: evicting it from the device loses nothing."""
        return self._directory.holds(key)

    def has(self, tier: str, key: BlockKey) -> bool:
        """Whether this block can be read in host memory or a local tier, as `Directory.has` says."""
        return self._directory.has(tier, key)

    def watch(self) -> ContentChanges:
        """Notes from now on what comes to host memory and local tiers and goes, as `Directory.watch` does."""
        return self._directory.watch()

    def note_eviction(self, key: BlockKey, block_id: int) -> None:
        """`BlockPool`'s spill callback. What was not copied by now is dropped: a step never waits for a copy."""
        self._metrics.device_evictions.labels("clean" if self.holds(key) else "dropped").inc()

    def check(self) -> None:
        """Verifies the bookkeeping; raises `InvariantError`."""
        self._pump()
        self._directory.check()

    def close(self) -> None:
        """Ends after the writes to the tiers below that are under way; tiers and device stay the caller's.

        What `write_back` owes is written within `settle_s`; the rest is forgotten.
        """
        self._pump()
        deadline = self._clock() + self._settle_s
        while self._directory.settle() and self._clock() < deadline:
            self._pump()
            self._mover.wait(0.05)
            self._pump()
        self._directory.give_up()
        self._mover.close()
        self._directory.close()

    def _pump(self) -> None:
        self._directory.deliver(0, self._mover.poll())
        self._mover.submit(self._directory.take_messages())
