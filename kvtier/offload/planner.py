"""How much of a hit is worth fetching."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier.offload.speeds import Speeds
from kvtier.tiers.base import Status

_PATIENCE = 2.0
"""How many times as long as computing a block fetching it may take, since others compute meanwhile."""


@dataclass(frozen=True, slots=True)
class BlockStatus:
    """The place in which one block of a lookup was found. `tier` is empty unless `status` is HIT."""

    status: Status
    tier: str = ""


MISSING = BlockStatus(Status.MISS)
PENDING = BlockStatus(Status.PENDING)


class Planner(Protocol):
    """Weighs fetching against computing. Scheduler thread; called once per request; must not block."""

    def blocks_to_fetch(self, statuses: Sequence[BlockStatus], num_computed: int | None = None) -> int:
        """How many leading blocks to fetch: at most the leading run of hits.

        :param num_computed: how many blocks of tokens are computed if none of these is fetched. None: as many as there
            are, which is not so where KV groups have several for the same tokens, or some of them on the device.
        """


class AlwaysFetch:
    """Fetches every leading hit."""

    def blocks_to_fetch(self, statuses: Sequence[BlockStatus], num_computed: int | None = None) -> int:
        return leading_hits(statuses)


class FetchIfFaster:
    """Fetches the leading hits up to where it saves most time, by what both ways have taken lately.

    What is not measured yet, or not lately, is fetched.
    """

    def __init__(self, speeds: Speeds) -> None:
        """:param speeds: the directory's; somebody has to tell it what computing takes."""
        self._speeds = speeds

    def blocks_to_fetch(self, statuses: Sequence[BlockStatus], num_computed: int | None = None) -> int:
        num_hits = leading_hits(statuses)
        computing_s = self._speeds.computing_s()
        if computing_s is None or not num_hits:
            return num_hits
        if num_computed is not None:
            computing_s *= num_computed / len(statuses)
        waits_s: dict[str, tuple[float, float]] = {}
        saved_s = most_s = 0.0
        best = 0
        for index, status in enumerate(statuses[:num_hits]):
            if status.tier not in waits_s:
                queue_s, each_s = self._speeds.fetching_s(status.tier) or (0.0, 0.0)
                waits_s[status.tier] = queue_s, each_s
                saved_s -= queue_s
            saved_s += computing_s * _PATIENCE - waits_s[status.tier][1]
            if saved_s >= most_s:
                most_s, best = saved_s, index + 1
        return best


def leading_hits(statuses: Sequence[BlockStatus]) -> int:
    """Returns the length of the run of hits at the start."""
    for index, status in enumerate(statuses):
        if status.status is not Status.HIT:
            return index
    return len(statuses)
