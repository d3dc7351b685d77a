"""The best that any policy could have done, by knowing the trace to its end."""

import heapq
from collections.abc import Callable

from kvtier.traces.form import Trace


def belady_hit_rate(
    trace: Trace, capacity_blocks: int, *, warm_up: float = 0.0, on_progress: Callable[[int], None] = lambda count: None
) -> float | None:
    """The highest block hit rate that a cache of this size can have. None where nothing is asked for.

    From Belady: A study of replacement algorithms for a virtual-storage computer (IBM Systems Journal 1966): what is
    used last of all goes, and that may be the block that has just come. 2 us a reference.
    """
    never = sum(len(request.keys) for request in trace.requests)
    next_uses = _next_uses(trace, never)
    there: dict[int, int] = {}
    latest: list[tuple[int, int]] = []
    """(-next use, key), with stale entries: those whose key is not there with that next use."""
    num_hits = num_references = 0
    num_warm_up = int(len(trace.requests) * warm_up)
    place = 0
    for number, request in enumerate(trace.requests):
        counts = number >= num_warm_up and not request.is_write
        for key in request.keys:
            num_hits += counts and key in there
            there[key] = next_uses[place]
            heapq.heappush(latest, (-next_uses[place], key))
            if len(there) > capacity_blocks:
                _evict(there, latest)
            place += 1
        num_references += counts * len(request.keys)
        on_progress(len(request.keys))
    return num_hits / num_references if num_references else None


def _next_uses(trace: Trace, never: int) -> list[int]:
    """The place of the next reference to the same block, for each reference in order; `never` where there is none."""
    keys = [key for request in trace.requests for key in request.keys]
    next_uses = [never] * len(keys)
    following = [never] * trace.num_keys
    for place in range(len(keys) - 1, -1, -1):
        next_uses[place] = following[keys[place]]
        following[keys[place]] = place
    return next_uses


def _evict(there: dict[int, int], latest: list[tuple[int, int]]) -> None:
    while True:
        next_use, key = heapq.heappop(latest)
        if there.get(key) == -next_use:
            del there[key]
            return
