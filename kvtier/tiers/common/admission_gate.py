"""What a tier's conditions of admission say of blocks on their way to it: asked, counted, for any thread."""

import threading
from collections import Counter as Counts
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter

from kvtier.clock import MONOTONIC, Clock
from kvtier.identity.keys import TenantId, tenant_of
from kvtier.policies.admission import Admission, Offer


def declined_blocks(registry: CollectorRegistry) -> Counter:
    """The counter of blocks that conditions keep out; one for each registry."""
    return Counter(
        "kvtier_tier_declined_blocks",
        "Blocks offered to a tier that its admission kept out, by the first condition that did not hold",
        ["tier", "condition"],
        registry=registry,
    )


class AdmissionGate:
    """Lets blocks on their way to a tier, or not. Any thread; nothing blocks. About 2 us a block and condition.

    Blocks that are let in count as written at once, and as the tenant's, whatever becomes of them.
    """

    def __init__(
        self,
        admission: Admission,
        *,
        tier: str,
        declined: Counter,
        tenant_bytes: Callable[[TenantId], int] = lambda tenant: 0,
        clock: Clock = MONOTONIC,
    ) -> None:
        """
        :param admission: owned from now on.
        :param tier: the tier's name, for the counter `declined`.
        :param tenant_bytes: what a tenant has in the tier, if that can be known. What is on its way there is not in it.
        """
        self._admission = admission
        self._declined = {name: declined.labels(tier, name) for name in admission.names}
        self._tenant_bytes = tenant_bytes
        self._clock = clock
        self._lock = threading.Lock()
        """Guards the conditions."""

    def admits(self, blocks: Sequence[tuple[bytes, int]], run_blocks: int) -> list[bool]:
        """Offers blocks that the tier lacks; says of each whether it may go there. A block is offered once in a call.

        :param blocks: keys, which begin with the tenant, and payload bytes.
        :param run_blocks: how many blocks of one request are offered together.
        """
        sizes = dict(blocks)
        held = {tenant: self._tenant_bytes(tenant) for tenant in {tenant_of(key) for key in sizes}}
        answers: dict[bytes, bool] = {}
        refusals: Counts[str] = Counts()
        with self._lock:
            now_s = self._clock()
            for key, nbytes in sizes.items():
                tenant = tenant_of(key)
                offer = Offer(key, tenant, nbytes, run_blocks, now_s, held[tenant])
                refusal = self._admission.refusal(offer)
                if refusal is None:
                    self._admission.entered(offer)
                    held[tenant] += nbytes
                else:
                    refusals[refusal] += 1
                answers[key] = refusal is None
        for name, count in refusals.items():
            self._declined[name].inc(count)
        return [answers[key] for key, _ in blocks]
