"""The one form that traces have in memory, whatever file they come from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Request(NamedTuple):
    """What one request refers to."""

    time_s: float
    """Seconds since the first request of the trace."""
    keys: Sequence[int]
    """Its blocks in order. Equal numbers are the same block; they mean nothing outside the trace."""
    num_tokens: int
    """Length of the prompt, of which the last block may be a part; 0 where it is unknown."""
    tenant: int = 0
    is_write: bool = False
    """These blocks were only added: they are no demand, and count in no hit rate."""
    num_answer_tokens: int = 0
    """Length of the answer; 0 where it is unknown."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The cache that was there while the trace was recorded."""

    policy: str
    capacity_blocks: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their times."""

    name: str
    requests: Sequence[Request]
    num_keys: int
    """Distinct blocks: keys are 0 to `num_keys - 1`."""
    tokens_per_block: int | None = None
    """None where requests do not say how many tokens they have."""
    block_bytes: int | None = None
    """Mean size of a block, where blocks were seen being written."""
    recorded: Recorded | None = None
    num_dropped: int = 0
    """References that are missing, because the recorder did not keep up."""

    @property
    def num_references(self) -> int:
        """How many blocks requests refer to, each as often as it is referred to. O(requests)."""
        return sum(len(request.keys) for request in self.requests if not request.is_write)

    def ideal_hit_rate(self) -> float:
        """The share of references to blocks that were there before: the hit rate of an endless cache. O(references)."""
        seen: set[int] = set()
        num_hits = 0
        for request in self.requests:
            if not request.is_write:
                num_hits += sum(key in seen for key in request.keys)
            seen.update(request.keys)
        return num_hits / max(1, self.num_references)
