"""Which blocks a tier takes at all: conditions, put together for tiers whose writes cost more than a hit saves.

A block is offered to a tier that lacks it at each of its uses. Whoever offers it asks `Admission.refusal`, once for
each offer, and tells what is let in with `entered`. Not thread-safe: the owner's lock guards all of it.

What a condition remembers it remembers for each tenant by itself, so that nobody's blocks age out another's. A tenant
has a part of what is budgeted for all.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
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
    tenant_bytes: int = 0
    """What its tenant has in the tier."""


class Condition(Protocol):
    """Something that has to hold for a block to enter. O(1) a call."""

    def admits(self, offer: Offer) -> bool:
        """Whether the block may enter. Counts as an offer also where the answer is no."""

    def entered(self, offer: Offer) -> None:
        """The block was let in: all conditions have admitted it."""


class Admission:
    """Admits what every one of its conditions admits. Each is asked each time, so that each has seen all offers."""

    def __init__(self, conditions: Sequence[tuple[str, Condition]]) -> None:
        """:param conditions: with their names."""
        self._conditions = conditions
        self.names = [name for name, _ in conditions]

    def refusal(self, offer: Offer) -> str | None:
        """The name of the first condition that keeps the block out; None when it may enter."""
        refusing = [name for name, condition in self._conditions if not condition.admits(offer)]
        return refusing[0] if refusing else None

    def entered(self, offer: Offer) -> None:
        """The block was let in."""
        for _, condition in self._conditions:
            condition.entered(offer)


class _Stateless:
    """The part of a condition that need not know what was let in."""

    def entered(self, offer: Offer) -> None: ...


class PerTenant:
    """A condition that remembers offers, for each tenant by itself."""

    def __init__(self, make: Callable[[Offer], Condition]) -> None:
        """:param make: makes the condition of one tenant when its first block is offered."""
        self._make = make
        self._of_tenant: dict[Hashable, Condition] = {}
        """There are as many as tenants. Guarded by the owner's lock."""

    def admits(self, offer: Offer) -> bool:
        condition = self._of_tenant.get(offer.tenant)
        if condition is None:
            condition = self._of_tenant[offer.tenant] = self._make(offer)
        return condition.admits(offer)

    def entered(self, offer: Offer) -> None:
        self._of_tenant[offer.tenant].entered(offer)


class Frequency(_Stateless):
    """Admits what was offered at least so often lately, by a sketch: now and then also what was offered less often."""

    def __init__(self, least: int, num_counters: int) -> None:
        """:param num_counters: 4 bytes each; see `FrequencySketch`."""
        self._least = least
        self._sketch = FrequencySketch(num_counters)

    def admits(self, offer: Offer) -> bool:
        return self._sketch.add(offer.key) >= self._least


class SecondUse(_Stateless):
    """Admits what was offered before, among the last offers of distinct blocks: exact, about 130 bytes for each."""

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


class TenantShare(_Stateless):
    """Admits while the tenant has less than its share of the tier."""

    def __init__(self, most_bytes: float) -> None:
        self._most_bytes = most_bytes

    def admits(self, offer: Offer) -> bool:
        return offer.tenant_bytes + offer.nbytes <= self._most_bytes


@dataclass(slots=True)
class _Part:
    """A tenant's part of a budget."""

    left_bytes: float
    income_bytes: float
    """What each tenant had got when `left_bytes` was right."""
    seen_s: float
    """When the tenant last offered something."""


class BytesPerDay:
    """Admits while the day's budget of writes lasts, which comes in little by little: an SSD's endurance.

    Tenants that offered something within the last hour get equal parts of what comes in. What they leave others may
    use, as long as half of what can be saved up is left.
    """

    def __init__(self, bytes_per_day: float) -> None:
        self._bytes_per_s = bytes_per_day / _DAY_S
        self._most_bytes = self._bytes_per_s * _BURST_S
        self._left_bytes = self._most_bytes
        """What may be written now. All of these: guarded by the owner's lock."""
        self._time_s: float | None = None
        self._income_bytes = 0.0
        """What a tenant has got that was there from the start."""
        self._parts: OrderedDict[Hashable, _Part] = OrderedDict()
        """The parts by tenant; the tenant that offered something last is last."""

    def admits(self, offer: Offer) -> bool:
        part = self._settled(offer)
        if self._left_bytes < offer.nbytes:
            return False
        return part.left_bytes >= offer.nbytes or self._left_bytes - offer.nbytes >= self._most_bytes / 2

    def entered(self, offer: Offer) -> None:
        self._left_bytes -= offer.nbytes
        part = self._parts[offer.tenant]
        part.left_bytes = max(0.0, part.left_bytes - offer.nbytes)

    def _settled(self, offer: Offer) -> _Part:
        """The part of the block's tenant, after what has come in since the last offer."""
        since_s = 0.0 if self._time_s is None else offer.time_s - self._time_s
        self._time_s = offer.time_s
        self._left_bytes = min(self._left_bytes + since_s * self._bytes_per_s, self._most_bytes)
        self._income_bytes += since_s * self._bytes_per_s / max(1, len(self._parts))
        part = self._parts.get(offer.tenant)
        if part is None:
            part = _Part(0.0 if self._parts else self._left_bytes, self._income_bytes, offer.time_s)
            self._parts[offer.tenant] = part
        part.left_bytes = min(part.left_bytes + self._income_bytes - part.income_bytes, self._most_bytes)
        part.income_bytes, part.seen_s = self._income_bytes, offer.time_s
        self._parts.move_to_end(offer.tenant)
        while next(iter(self._parts.values())).seen_s < offer.time_s - _BURST_S:
            self._parts.popitem(last=False)
        return part
