"""A trace as the load of a fleet."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import xxhash

from kvtier.errors import ConfigError
from kvtier.traces.form import Trace
from kvtier_gateway.fleet.request import SimRequest
from kvtier_gateway.routing.values import Prices

CHARACTERS_PER_BLOCK = 128
_SESSION_BRANCHES = 4


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their arrival, at the speed of the trace."""

    requests: Sequence[SimRequest]
    tokens_per_block: int
    duration_s: float
    compute_s: float
    """Seconds that one engine takes to compute all prompts without any cache."""

    def speed(self, num_engines: int, load: float) -> float:
        """How many times as fast as the trace requests arrive, so that they offer `load`: the computing of all prompts
        without any cache, over what the engines can compute in that time."""
        return self.duration_s * num_engines * load / self.compute_s


def workload(trace: Trace, compute: Prices, seed: int, max_requests: int | None = None) -> Workload:
    """The trace from another request on for each seed, and from its beginning after its end; seed 0: as it is.

    :raises ConfigError: the trace does not say how long prompts are, or all come at once.
    """
    size, given = trace.tokens_per_block, [request for request in trace.requests if not request.is_write]
    if size is None or not all(request.num_tokens for request in given):
        raise ConfigError(
            f"{trace.name} does not say how long its prompts are: name a trace of JSON lines, as Mooncake's"
        )
    duration_s = given[-1].time_s * len(given) / max(1, len(given) - 1)
    if duration_s <= 0:
        raise ConfigError(f"all requests of {trace.name} come at once: name a trace that takes some time")
    start = random.Random(seed).randrange(len(given)) if seed else 0
    sessions = _Sessions(request.keys for request in given)
    requests = []
    for number in range(min(len(given), max_requests or len(given))):
        request = given[(start + number) % len(given)]
        arrives_s = (request.time_s - given[start].time_s) % duration_s
        keys = tuple(request.keys[: (request.num_tokens - 1) // size])
        told = SimRequest(
            number,
            arrives_s,
            keys,
            request.num_tokens,
            max(1, request.num_answer_tokens),
            sessions.name(request.keys),
            request.keys,
        )
        requests.append(told)
    compute_s = sum(compute.compute_s(0, request.prompt_tokens) for request in requests)
    return Workload(requests, size, duration_s * len(requests) / len(given), compute_s)


class _Sessions:
    """Names sessions: a prompt that goes on from the end of another one is of its session.

    Ends that more than a few blocks follow are prompts that sessions share, and name none.
    """

    def __init__(self, prompts: Iterable[Sequence[int]]) -> None:
        followers: dict[int, set[int]] = {}
        for ids in prompts:
            for key, following in pairwise(ids):
                followers.setdefault(key, set()).add(following)
        self._shared = {key for key, after in followers.items() if len(after) > _SESSION_BRANCHES}
        self._by_end: dict[int, str] = {}
        self._count = 0

    def name(self, ids: Sequence[int]) -> str:
        """The session of a prompt; it ends in this prompt's last full block from now on."""
        full = ids[:-1]
        known = next((self._by_end[key] for key in reversed(full) if key in self._by_end), None)
        if known is None:
            self._count += 1
            known = str(self._count)
        if full and full[-1] not in self._shared:
            self._by_end[full[-1]] = known
        return known


class SyntheticText:
    """Prompts as text: 128 characters for each block, the same for equal ids, and unlike those of others."""

    def __init__(self) -> None:
        self._pieces: dict[int, str] = {}

    def of(self, ids: Sequence[int]) -> str:
        """The text of a prompt."""
        pieces = self._pieces
        return "".join([pieces.get(key) or self._piece(key) for key in ids])

    def _piece(self, key: int) -> str:
        piece = "".join(
            xxhash.xxh64_hexdigest(key.to_bytes(8, "big"), seed=i) for i in range(CHARACTERS_PER_BLOCK // 16)
        )
        self._pieces[key] = piece
        return piece
