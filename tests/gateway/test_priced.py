"""`priced`: what it prefers, what it credits at once, and what it learns."""

from dataclasses import replace

import pytest

from kvtier_gateway.routing.kv_index import Runs
from kvtier_gateway.routing.ledger import Ledger
from kvtier_gateway.routing.priced import Priced
from kvtier_gateway.routing.pricing import Work, cheapest
from kvtier_gateway.routing.values import (
    BlocksStored,
    Candidate,
    Choice,
    EngineId,
    Load,
    Medium,
    Prices,
    Prompt,
)

A, B, C = (EngineId(name) for name in "abc")
BLOCK = 512
POOL = Prices(pool_bytes_per_s=12.5e9)
NO_POOL = Prices()


def prompt(keys: range, num_in_pool: int | None = None) -> Prompt:
    return Prompt(len(keys) * BLOCK + 1, keys=keys, tokens_per_block=BLOCK, num_in_pool=num_in_pool)


def fleet(prices: Prices, **loads: Load) -> list[Candidate]:
    return [Candidate(EngineId(name), loads.get(name, Load()), prices) for name in "abc"]


def send(strategy: Priced, asked: Prompt, candidates: list[Candidate], request: int, now_s: float = 0.0) -> Choice:
    choice = strategy.choose(asked, candidates, now_s)
    strategy.sent(request, asked, choice, now_s)
    return choice


@pytest.mark.parametrize("prices", [POOL, NO_POOL, replace(POOL, pool_bytes_per_s=2e9), replace(POOL, token_s=1e-6)])
def test_no_cut_between_the_ends_is_cheaper(prices: Prices) -> None:
    """The formula looks at ends alone. Here all cuts are priced one by one."""
    asked, runs, num_in_pool = prompt(range(100)), Runs(10, 40), 90
    block_bytes = BLOCK * prices.kv_bytes_per_token

    def cost_s(cut: int) -> float:
        from_host, from_pool = max(0, min(cut, 40) - 10), max(0, cut - 40)
        fetch_s = from_host * block_bytes / prices.host_bytes_per_s
        if from_pool:
            fetch_s += from_pool * block_bytes / prices.pool_bytes_per_s if prices.pool_bytes_per_s else float("inf")
        return fetch_s + prices.request_s + prices.compute_s(cut * BLOCK, 100 * BLOCK + 1)

    work = cheapest(prices, asked, runs, num_in_pool)
    assert work.fetch_s + work.compute_s == pytest.approx(min(map(cost_s, range(10, 91))))


def test_one_token_at_least_is_computed() -> None:
    whole = replace(prompt(range(10)), num_tokens=10 * BLOCK)
    assert cheapest(NO_POOL, whole, Runs(10, 10), 10).cut == 9
    assert cheapest(NO_POOL, Prompt(), Runs(0, 0), 0) == Work(0, 0.0, NO_POOL.request_s)


def test_with_a_pool_a_queue_costs_more_than_a_fetch_and_without_one_less_than_computing() -> None:
    """One formula: a dead pool has an infinite price, and that is affinity."""
    for prices, num_in_pool, follows in ((POOL, 100, False), (NO_POOL, None, True)):
        strategy = Priced()
        strategy.kv_event(A, BlocksStored(range(100), Medium.DEVICE))
        send(strategy, prompt(range(1000, 1040)), fleet(prices)[:1], 1)  # a backlog of 0.8 s at A
        choice = strategy.choose(prompt(range(100), num_in_pool), fleet(prices), 0.0)
        assert (choice.engine == A) is follows, choice
        assert choice.reason == ("prefix" if follows else "fetch")


def test_a_dispatch_counts_at_once_so_that_equals_do_not_herd() -> None:
    strategy = Priced()
    engines = [send(strategy, prompt(range(i * 100, i * 100 + 20)), fleet(NO_POOL), i).engine for i in range(30)]
    assert {engines.count(engine) for engine in (A, B, C)} <= {9, 10, 11}


def test_siblings_follow_a_prefix_that_is_being_computed_or_let_the_pool_bring_it() -> None:
    strategy = Priced()
    first = send(strategy, prompt(range(100)), fleet(POOL), 0)
    sibling = strategy.choose(prompt(range(101), 0), fleet(POOL), 0.0)
    assert (sibling.engine, sibling.reason) == (first.engine, "prefix")
    # Another engine is as busy for other reasons: what is computed here is in the pool before its turn there.
    other = next(candidate for candidate in fleet(POOL) if candidate.engine != first.engine)
    send(strategy, prompt(range(5000, 5130)), [other], 1)
    assert strategy.choose(prompt(range(101), 0), [other], 0.0).reason == "fetch"


def test_a_dead_pool_brings_nobody_anything() -> None:
    strategy = Priced()
    first = send(strategy, prompt(range(100)), fleet(POOL), 0)
    other = next(candidate for candidate in fleet(POOL) if candidate.engine != first.engine)
    send(strategy, prompt(range(5000, 5130)), [other], 1)
    assert strategy.choose(prompt(range(101), None), [other], 0.0).reason == "backlog"


def test_what_was_computed_is_known_before_its_event_comes() -> None:
    strategy = Priced()
    engine = send(strategy, prompt(range(50)), fleet(NO_POOL), 0).engine
    strategy.first_token(0, 1.0)
    strategy.finished(0, 2.0)
    assert strategy.choose(prompt(range(50)), fleet(NO_POOL), 3.0).engine == engine
    strategy.engine_left(engine)
    assert strategy.choose(prompt(range(50)), fleet(NO_POOL), 3.0).reason == "backlog"


def test_near_ties_go_to_the_one_with_fewer_requests_under_way() -> None:
    strategy = Priced()
    candidates = fleet(NO_POOL, a=Load(running=9), b=Load(running=9))
    engines = [strategy.choose(prompt(range(10)), candidates, 0.0).engine for _ in range(300)]
    assert engines.count(C) == pytest.approx(200, abs=40), "whenever it is one of the two drawn"


def test_a_ledger_learns_how_slow_an_engine_is_and_no_error_adds_up() -> None:
    ledger, now_s = Ledger(), 0.0
    for request in range(200):
        ledger.add(request, 0.0, 1.0, now_s)
        now_s += 3.0
        ledger.first_token(request, now_s)
    assert ledger.slowness == pytest.approx(3.0, rel=0.05)
    assert ledger.backlog_s(now_s) == 0.0
    ledger.add("slow", 0.0, 1.0, now_s)
    assert ledger.backlog_s(now_s + 1.0) == pytest.approx(2.0, rel=0.05)
    assert ledger.backlog_s(now_s + 100.0) == 0.0, "what is late is expected at any moment"
    ledger.drop("slow")
    assert ledger.backlog_s(now_s) == 0.0


def test_the_best_alternative_is_told_for_regret() -> None:
    choice = Priced().choose(prompt(range(10)), fleet(NO_POOL), 0.0)
    assert choice.predicted_s == choice.alternative_s
    assert Priced().choose(prompt(range(10)), fleet(NO_POOL)[:1], 0.0).alternative_s is None


def test_a_pool_that_has_less_than_host_memory_makes_nothing_cheaper() -> None:
    """Also where neither is worth its bytes: what host memory has as well is not taken off the cost of fetching."""
    prices = replace(NO_POOL, host_bytes_per_s=1e3, pool_bytes_per_s=1e2)
    prompt = Prompt(num_tokens=330, tokens_per_block=16)
    computed = cheapest(prices, prompt, Runs(0, 0), 0)
    assert cheapest(prices, prompt, Runs(0, 10), 5) == cheapest(prices, prompt, Runs(0, 10), 10) == computed
