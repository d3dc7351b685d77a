"""One level of a simulated cache: the very policy and admission that a real one would have, and no bytes."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from kvtier.policies.admission import Admission, Offer
from kvtier.policies.base import EvictionPolicy, Use
from kvtier.traces.form import Request


@dataclass(slots=True)
class SimulatedTier:
    """Holds keys as far as its capacity goes, and counts. One thread. About 1 us a block with LRU."""

    name: str
    capacity: int
    """Blocks, or bytes where `costs` has bytes."""
    policy: EvictionPolicy[int]
    admission: Admission | None = None
    """None: every block is taken."""
    costs: Sequence[int] | None = None
    """What each block takes of the capacity, by key. None: each takes 1."""
    used: int = 0
    """What the blocks that are here take of the capacity."""
    num_writes: int = 0
    num_evicted: int = 0
    num_declined: int = 0
    """Blocks that the admission did not let in."""
    _owners: dict[int, tuple[Hashable, int]] = field(default_factory=dict)
    """Tenant and bytes of each block that is here. Kept where there is an admission, as the next one is."""
    _tenant_bytes: Counter[Hashable] = field(default_factory=Counter)
    """Bytes of each tenant that are here."""

    def take(
        self, request: Request, uses: Sequence[Use[int]], order: Sequence[int], above: Sequence[bool] | None
    ) -> None:
        """A request uses its blocks: those that are here are touched, the others are offered.

        :param uses: by index in the request.
        :param order: the indices, in the order of use.
        :param above: by index: the block was found in a tier above, so that this tier saw no use of it. None: no tier.
        """
        policy, keys = self.policy, request.keys
        runs = _runs(keys, policy) if self.admission is not None else None
        for index in order:
            key = keys[index]
            if key in policy:
                if not request.is_write and (above is None or not above[index]):
                    policy.touch(key, uses[index])
                continue
            if runs is not None and not self._admits(request, index, uses[index].nbytes, runs[index]):
                continue
            cost = self.costs[key] if self.costs is not None else 1
            while self.used + cost > self.capacity:
                self._evict()
            policy.insert(key, uses[index])
            self.used += cost
            self.num_writes += 1

    def _evict(self) -> None:
        key = self.policy.coldest(1)[0]
        self.policy.remove(key, evicted=True)
        self.used -= self.costs[key] if self.costs is not None else 1
        self.num_evicted += 1
        if self.admission is not None:
            tenant, nbytes = self._owners.pop(key)
            self._tenant_bytes[tenant] -= nbytes

    def _admits(self, request: Request, index: int, nbytes: int, run_blocks: int) -> bool:
        assert self.admission is not None
        key, tenant = request.keys[index], request.tenant
        offer = Offer(key, tenant, nbytes, run_blocks, request.time_s, self._tenant_bytes[tenant])
        if self.admission.refusal(offer) is not None:
            self.num_declined += 1
            return False
        self.admission.entered(offer)
        self._owners[key] = (tenant, nbytes)
        self._tenant_bytes[tenant] += nbytes
        return True


def _runs(keys: Sequence[int], policy: EvictionPolicy[int]) -> list[int]:
    """The length of the run of absent neighbours that each block is in; 0 for a block that is there."""
    runs = [0] * len(keys)
    start = 0
    for end in range(len(keys) + 1):
        if end == len(keys) or keys[end] in policy:
            runs[start:end] = [end - start] * (end - start)
            start = end + 1
    return runs
