"""How tenants share a tier: what each is owed, and who gives way to whom."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvtier.errors import InvalidInputError

_LEAST_WEIGHT = 1e-9
"""Stands for a weight of 0: whatever such a tenant has beyond its guarantee, it gives way to everybody else."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one tenant is owed of a tier. What it does not use is lent to others, who give it back when it is asked for.

    Beyond what is guaranteed, tenants have equal parts of the rest, by their weights.
    """

    guaranteed_bytes: int = 0
    """Others cannot keep so much from it. All guarantees together fit into the capacity."""
    cap_bytes: int | None = None
    """The most that it may have, though there is room. None: no such bound."""
    weight: float = 1.0
    """How large its part is of what is not guaranteed, beside the others' weights."""

    def __post_init__(self) -> None:
        if self.guaranteed_bytes < 0 or not (self.weight >= 0 and math.isfinite(self.weight)):
            raise InvalidInputError(f"{self}: guarantees and weights are 0 or more")
        if self.cap_bytes is not None and self.cap_bytes < max(1, self.guaranteed_bytes):
            raise InvalidInputError(f"{self}: the cap is below what is guaranteed; raise it or leave it out")

    def excess(self, nbytes: int) -> float:
        """How far somebody with so many bytes is above what is guaranteed, by weight. Below 0: under the guarantee."""
        beyond = nbytes - self.guaranteed_bytes
        return beyond if beyond <= 0 else beyond / max(self.weight, _LEAST_WEIGHT)


EQUAL_SHARE = Share()
"""The share of tenants for whom nothing was said."""


def require_room(shares: Iterable[Share], capacity_bytes: int) -> None:
    """Raises `InvalidInputError` when more is guaranteed than there is."""
    guaranteed_bytes = sum(share.guaranteed_bytes for share in shares)
    if guaranteed_bytes > capacity_bytes:
        raise InvalidInputError(
            f"{guaranteed_bytes:,} bytes are guaranteed in all, and the tier has {capacity_bytes:,}; guarantee less"
        )


def gives_way(lender: Share, lender_bytes: int, borrower: Share, borrower_bytes: int, nbytes: int) -> bool:
    """Whether one who has `lender_bytes` gives `nbytes` to one who has `borrower_bytes`.

    Only what is above its guarantee, and not if it would then be further below the other than the other is now.
    """
    left = lender.excess(lender_bytes - nbytes)
    return left >= 0 and left >= borrower.excess(borrower_bytes + nbytes)
