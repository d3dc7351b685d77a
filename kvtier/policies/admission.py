"""Which blocks a tier takes at all: conditions, put together for tiers whose writes cost more than a hit saves.

A tier asks `admits` of each block that it is offered and lacks, once for each offer, and then tells what it took with
`entered`, and what it lost with `left`. Not thread-safe: the owner's lock guards it, as it guards a policy.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol

from kvtier.policies.sketch import FrequencySketch

_DAY_S = 86_400.0
_BURST_S = 3_600.0
"""What a budget saves up while little is written: an hour of it."""


class Offer(NamedTuple):
    """A block that a tier could take."""

    key: Hashable
    tenant: Hashable
    nbytes: int
    run_blocks: int
    """How many neighbours in the request are offered together, itself included."""
    time_s: float
    """When the block was offered, by a clock that never goes back."""


class Admission(Protocol):
    """One condition, or several of them. O(1) a call."""

    def admits(self, offer: Offer) -> bool:
        """Whether the block may enter. Counts as an offer also where the answer is no."""

    def entered(self, offer: Offer) -> None:
        """The block was taken."""

    def left(self, key: Hashable) -> None:
        """A block that had entered was evicted or discarded."""


class _Stateless:
    """The part of a condition that need not know what a tier has: it notes neither what enters nor what leaves."""

    def entered(self, offer: Offer) -> None: ...

    def left(self, key: Hashable) -> None: ...


class AllOf:
    """Admits what every one of its conditions admits. Each is asked each time, so that each has seen all offers."""

    def __init__(self, conditions: Sequence[Admission]) -> None:
        self._conditions = conditions

    def admits(self, offer: Offer) -> bool:
        answers = [condition.admits(offer) for condition in self._conditions]
        return all(answers)

    def entered(self, offer: Offer) -> None:
        for condition in self._conditions:
            condition.entered(offer)

    def left(self, key: Hashable) -> None:
        for condition in self._conditions:
            condition.left(key)


class Frequency(_Stateless):
    """Admits what was offered at least so often lately, by a sketch: now and then also what was offered less often."""

    def __init__(self, least: int, num_counters: int) -> None:
        self._least = least
        self._sketch = FrequencySketch(num_counters)

    def admits(self, offer: Offer) -> bool:
        return self._sketch.add(offer.key) >= self._least


class SecondUse(_Stateless):
    """Admits what was offered before, among the last offers of distinct blocks: exact, and so much memory for each."""

    def __init__(self, num_remembered: int) -> None:
        """:param num_remembered: how many blocks are remembered at least; twice as many at most."""
        self._most = num_remembered
        self._recent: set[Hashable] = set()
        """Offered once. When it is full it becomes `_older`. Both: guarded by the owner's lock."""
        self._older: set[Hashable] = set()

    def admits(self, offer: Offer) -> bool:
        if offer.key in self._recent or offer.key in self._older:
            return True
        if len(self._recent) >= self._most:
            self._older, self._recent = self._recent, set()
        self._recent.add(offer.key)
        return False


class MinRun(_Stateless):
    """Admits blocks of which enough neighbours are offered together: short reads cost as much as long ones."""

    def __init__(self, least: int) -> None:
        self._least = least

    def admits(self, offer: Offer) -> bool:
        return offer.run_blocks >= self._least


class TenantShare:
    """Admits while the tenant has less than its share of the tier. Remembers tenant and size of what is there."""

    def __init__(self, most_bytes: float) -> None:
        self._most_bytes = most_bytes
        self._used: dict[Hashable, int] = {}
        """Bytes by tenant. Both: guarded by the owner's lock."""
        self._blocks: dict[Hashable, tuple[Hashable, int]] = {}

    def admits(self, offer: Offer) -> bool:
        return self._used.get(offer.tenant, 0) + offer.nbytes <= self._most_bytes

    def entered(self, offer: Offer) -> None:
        self._blocks[offer.key] = (offer.tenant, offer.nbytes)
        self._used[offer.tenant] = self._used.get(offer.tenant, 0) + offer.nbytes

    def left(self, key: Hashable) -> None:
        tenant, nbytes = self._blocks.pop(key)
        self._used[tenant] -= nbytes
        if not self._used[tenant]:
            del self._used[tenant]


class BytesPerDay:
    """Admits while the day's budget of writes lasts, which comes in little by little: an SSD's endurance."""

    def __init__(self, bytes_per_day: float) -> None:
        self._bytes_per_s = bytes_per_day / _DAY_S
        self._left_bytes = self._bytes_per_s * _BURST_S
        """What may be written now. Both: guarded by the owner's lock."""
        self._time_s: float | None = None

    def admits(self, offer: Offer) -> bool:
        since_s = 0.0 if self._time_s is None else offer.time_s - self._time_s
        self._time_s = offer.time_s
        self._left_bytes = min(self._left_bytes + since_s * self._bytes_per_s, self._bytes_per_s * _BURST_S)
        return self._left_bytes >= offer.nbytes

    def entered(self, offer: Offer) -> None:
        self._left_bytes -= offer.nbytes

    def left(self, key: Hashable) -> None: ...
