"""The simulator against one that is written down as the definitions read, with nothing but lists."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.policies.registry import by_name
from kvtier.simulate.belady import belady_hit_rate
from kvtier.simulate.cases import Case, Level, simulate
from kvtier.simulate.replay import ReplayOptions, replay
from kvtier.simulate.tier import SimulatedTier
from kvtier.traces.form import Request, Trace

TOKENS = 4


def trace_of(chains: list[list[int]], *, tenants: list[int] | None = None) -> Trace:
    """A request of each; its last block is half a one."""
    requests = [
        Request(float(second), keys, max(0, len(keys) * TOKENS - TOKENS // 2), tenants[second] if tenants else 0)
        for second, keys in enumerate(chains)
    ]
    return Trace("test", requests, 1 + max((key for keys in chains for key in keys), default=0), TOKENS)


def naive_lru(chains: list[list[int]], capacity: int, *, first: int = 0, head_first: bool = False) -> dict[str, float]:
    """Coldest first in a list; blocks of a request are used last to first."""
    there: list[int] = []
    blocks = prefix = tokens = all_tokens = references = writes = 0
    for number, keys in enumerate(chains):
        found = [key in there for key in keys]
        leading = [*found, False].index(False)
        if number >= first:
            references += len(keys)
            blocks += sum(found)
            prefix += leading
            length = max(0, len(keys) * TOKENS - TOKENS // 2)
            all_tokens += length
            tokens += sum(min(TOKENS, length - block * TOKENS) for block in range(leading))
        for key in keys if head_first else reversed(keys):
            if key in there:
                there.remove(key)
            else:
                writes += 1
                if len(there) == capacity:
                    there.pop(0)
            there.append(key)
    return {
        "block_hit_rate": blocks / references,
        "prefix_hit_rate": prefix / references,
        "token_hit_rate": tokens / all_tokens,
        "writes": writes,
    }


chains = st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=6), min_size=1, max_size=30)


@given(chains=chains, capacity=st.integers(1, 14), warm_up=st.sampled_from([0.0, 0.5]), head_first=st.booleans())
def test_lru_is_what_the_definitions_say(
    chains: list[list[int]], capacity: int, warm_up: float, head_first: bool
) -> None:
    result = simulate(trace_of(chains), Case("lru", [Level("cache", capacity)]), ReplayOptions(warm_up, head_first))
    first = len(chains) // 2 if warm_up else 0
    expected = naive_lru(chains, capacity, first=first, head_first=head_first)
    assert result.rates == {name: expected[name] for name in result.rates}
    assert result.writes == expected["writes"]


def best_of_all(keys: list[int], capacity: int, there: frozenset[int] = frozenset()) -> int:
    """The most hits, by trying everything."""
    if not keys:
        return 0
    key, rest = keys[0], keys[1:]
    if key in there:
        return 1 + best_of_all(rest, capacity, there)
    with_key = there | {key}
    if len(with_key) <= capacity:
        return best_of_all(rest, capacity, with_key)
    return max(best_of_all(rest, capacity, with_key - {victim}) for victim in with_key)


@given(
    chains=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=4),
    capacity=st.integers(1, 3),
)
def test_belady_is_the_best_there_is(chains: list[list[int]], capacity: int) -> None:
    keys = [key for chain in chains for key in chain]
    assert belady_hit_rate(trace_of(chains), capacity) == best_of_all(keys, capacity) / len(keys)


@given(chains=chains, capacity=st.integers(1, 14), policy=st.sampled_from(["lru", "s3fifo", "arc", "lfu"]))
def test_no_policy_beats_belady(chains: list[list[int]], capacity: int, policy: str) -> None:
    # Each block once a request: within a request all its blocks are looked up before any is used.
    trace = trace_of([list(dict.fromkeys(keys)) for keys in chains])
    best = belady_hit_rate(trace, capacity)
    found = simulate(trace, Case(policy, [Level("cache", capacity)]), ReplayOptions()).rates["block_hit_rate"]
    assert best is not None
    assert found is not None
    assert found <= best + 1e-9 or capacity < max(len(keys) for keys in chains)


@given(chains=chains, capacities=st.tuples(st.integers(1, 5), st.integers(1, 9)))
def test_tiers_are_filled_beside_each_other(chains: list[list[int]], capacities: tuple[int, int]) -> None:
    """A second tier sees the uses of what the first did not have, and is offered all that it lacks."""
    upper: list[int] = []
    lower: list[int] = []
    hits = [0, 0]
    for keys in chains:
        above = [key in upper for key in keys]
        hits[0] += sum(above)
        hits[1] += sum(key in lower and not had for key, had in zip(keys, above, strict=True))
        for tier, capacity, had in ((upper, capacities[0], [False] * len(keys)), (lower, capacities[1], above)):
            for key, was_above in reversed(list(zip(keys, had, strict=True))):
                if key in tier:
                    if not was_above:
                        tier.remove(key)
                        tier.append(key)
                else:
                    if len(tier) == capacity:
                        tier.pop(0)
                    tier.append(key)
    levels = [Level(name, capacity) for name, capacity in zip(("host", "disk"), capacities, strict=True)]
    result = simulate(trace_of(chains), Case("lru", levels), ReplayOptions())
    references = sum(map(len, chains))
    assert [tier.hit_rate for tier in result.tiers] == [count / references for count in hits]
    assert [tier.writes - tier.evictions for tier in result.tiers] == [len(upper), len(lower)]


def test_what_was_only_written_is_no_demand() -> None:
    """An answer's blocks are there for the next turn; that they were added is no use of what is there."""
    requests = [
        Request(0.0, [0, 1], 0),
        Request(1.0, [1, 2], 0, is_write=True),
        Request(2.0, [0, 1, 2], 0),
    ]
    tier = SimulatedTier("cache", 3, by_name("lfu"))
    counts = replay(Trace("test", requests, 3), [tier], ReplayOptions())
    assert counts.rates() == {"block_hit_rate": 3 / 5, "prefix_hit_rate": 3 / 5, "token_hit_rate": None}
    assert tier.num_writes == 3
    assert tier.policy._records[1].hits == 2


def test_a_cache_is_told_of_the_request() -> None:
    seen = []

    class Told:
        def insert(self, key: int, use: object) -> None:
            seen.append((key, use))

        def __contains__(self, key: object) -> bool:
            return False

        def __len__(self) -> int:
            return 0

    replay(trace_of([[7, 8]]), [SimulatedTier("cache", 5, Told())], ReplayOptions(block_bytes=64))  # type: ignore[arg-type]
    assert [(key, *use) for key, use in seen] == [(8, 7, 1, 2, 0, 0, 64), (7, None, 0, 2, 0, 0, 64)]


@pytest.mark.parametrize(
    ("admission", "writes"),
    [
        (None, 6),
        ("second-use", 2),
        ("frequency:3", 1),
        ("min-run:2", 4),
        ("tenant-share:0.5", 2),
        ("bytes-per-day:48", 2),
    ],
)
def test_admission_decides_what_is_written(admission: str | None, writes: int) -> None:
    chains = [[0, 1], [2], [0, 1], [0], [3], [4, 5], [0]]
    tenants = [0, 0, 0, 0, 0, 0, 0]
    case = Case("lru", [Level("cache", 4 if admission == "tenant-share:0.5" else 100)], admission)
    assert simulate(trace_of(chains, tenants=tenants), case, ReplayOptions()).writes == writes
