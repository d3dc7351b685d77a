"""Each published strategy does what its authors say it does, or fails as they or its users say."""

from collections.abc import Iterable

import pytest

from kvtier_gateway.routing.hash_trie import HashTrie
from kvtier_gateway.routing.radix import Radix
from kvtier_gateway.routing.registry import STRATEGIES, make_strategy
from kvtier_gateway.routing.simhash import fingerprint
from kvtier_gateway.routing.strategy import Strategy
from kvtier_gateway.routing.values import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Candidate,
    EngineId,
    Load,
    Medium,
    Prompt,
)

A, B, C = (EngineId(name) for name in "abc")
HEAD = "You are a helpful assistant. " * 10


def fleet(**loads: Load) -> list[Candidate]:
    return [Candidate(EngineId(name), loads.get(name, Load())) for name in "abc"]


def send(strategy: Strategy, prompt: Prompt, candidates: list[Candidate], request: int = 0) -> EngineId:
    choice = strategy.choose(prompt, candidates, 0.0)
    strategy.sent(request, prompt, choice, 0.0)
    return choice.engine


def keyed(keys: Iterable[int]) -> Prompt:
    keys = list(keys)
    return Prompt(num_tokens=64 * len(keys) + 1, keys=keys, tokens_per_block=64)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_serves_a_prompt_of_which_nothing_is_known(name: str) -> None:
    strategy = make_strategy(name)
    for request in range(20):
        assert send(strategy, Prompt(), fleet(), request) in {A, B, C}
        strategy.first_token(request, 1.0)
        strategy.finished(request, 2.0)
        strategy.failed(request, 2.0)
    strategy.engine_left(A)
    assert strategy.choose(Prompt(), fleet()[1:], 3.0).engine in {B, C}


@pytest.mark.parametrize("name", ["hash_trie", "radix", "simhash"])
def test_what_one_tenant_sent_draws_no_other(name: str) -> None:
    strategy = make_strategy(name)
    send(strategy, Prompt(text=HEAD * 3, tenant="red"), fleet())
    reasons = {
        tenant: strategy.choose(Prompt(text=HEAD * 3, tenant=tenant), fleet(), 0.0).reason for tenant in ("red", "blue")
    }
    assert reasons["red"] in {"prefix", "near"}
    assert reasons["blue"] not in {"prefix", "near"}


class TestSession:
    def test_a_session_stays_and_few_move_when_an_engine_leaves(self) -> None:
        strategy = make_strategy("session")
        prompts = [Prompt(session=f"{i}") for i in range(300)]
        before = [strategy.choose(prompt, fleet(), 0.0).engine for prompt in prompts]
        after = [strategy.choose(prompt, fleet()[:2], 0.0).engine for prompt in prompts]
        assert all(old == new for old, new in zip(before, after, strict=True) if old != C)
        assert 50 < before.count(C) < 150

    def test_a_hot_session_stays_on_a_full_engine(self) -> None:
        strategy, prompt = make_strategy("session"), Prompt(session="hot")
        engine = strategy.choose(prompt, fleet(), 0.0).engine
        assert strategy.choose(prompt, fleet(**{engine: Load(waiting=1000)}), 0.0).engine == engine


class TestChwbl:
    def test_no_engine_gets_more_than_a_quarter_above_the_mean(self) -> None:
        """Consistent hashing with bounded loads, theorem 1: the bound holds whatever the keys."""
        strategy, loads = make_strategy("chwbl"), {A: 0, B: 0, C: 0}
        for _ in range(90):
            candidates = [Candidate(engine, Load(running=load)) for engine, load in loads.items()]
            loads[strategy.choose(Prompt(text=HEAD), candidates, 0.0).engine] += 1
        assert max(loads.values()) <= 1.25 * 90 / 3 + 1

    def test_prompts_with_one_system_prompt_collapse_onto_one_engine(self) -> None:
        """KubeAI hashes the first 100 characters: longer common heads all have one point of the ring."""
        strategy = make_strategy("chwbl")
        engines = {strategy.choose(Prompt(text=f"{HEAD}{i}"), fleet(), 0.0).engine for i in range(50)}
        assert len(engines) == 1

    def test_adapters_are_apart(self) -> None:
        strategy = make_strategy("chwbl")
        prompts = [Prompt(text=HEAD, adapter=f"{i}") for i in range(50)]
        assert {strategy.choose(prompt, fleet(), 0.0).engine for prompt in prompts} == {A, B, C}


class TestHashTrie:
    def test_the_longest_match_wins_whatever_the_load(self) -> None:
        """production-stack's prefixaware looks at no load at all."""
        strategy, text = make_strategy("hash_trie"), HEAD * 5
        engine = send(strategy, Prompt(text=text), fleet())
        crowded = fleet(**{engine: Load(waiting=500)})
        assert {strategy.choose(Prompt(text=text + f"{i}"), crowded, 0.0).engine for i in range(20)} == {engine}

    def test_less_than_a_chunk_in_common_is_no_match(self) -> None:
        strategy = make_strategy("hash_trie")
        send(strategy, Prompt(text="x" * 100 + "y" * 100), fleet())
        assert strategy.choose(Prompt(text="x" * 100 + "z" * 100), fleet(), 0.0).reason == "no prefix"

    def test_memory_is_bounded(self) -> None:
        strategy = HashTrie(max_chunks=100)
        for i in range(50):
            send(strategy, Prompt(text=f"{i:03}" * 500), fleet())
        assert len(strategy) <= 100

    def test_engines_that_come_and_go_leave_the_others_what_they_have(self) -> None:
        strategy, text = make_strategy("hash_trie"), HEAD * 5
        assert send(strategy, Prompt(text=text), [Candidate(A)]) == A
        for i in range(200):
            name = EngineId(f"guest-{i}")
            send(strategy, Prompt(text=f"{i:04}" * 500), [Candidate(name)])
            strategy.engine_left(name)
        assert {strategy.choose(Prompt(text=text), fleet(), 0.0).engine for _ in range(20)} == {A}


class TestSimhash:
    def test_near_duplicates_differ_in_few_bits(self) -> None:
        words = [f"word{i * 7919 % 1000}" for i in range(300)]
        near, far = [*words[:299], "other"], [f"term{i * 104729 % 1000}" for i in range(300)]
        marks = [fingerprint(Prompt(text=" ".join(text))) for text in (words, near, far)]
        assert (marks[0] ^ marks[1]).bit_count() <= 3
        assert (marks[0] ^ marks[2]).bit_count() > 10

    def test_prompts_that_differ_at_the_head_alone_go_together_and_share_nothing(self) -> None:
        strategy, rest = make_strategy("simhash"), " ".join(f"word{i * 7919 % 1000}" for i in range(300))
        engine = send(strategy, Prompt(text="A user: " + rest), fleet())
        choice = strategy.choose(Prompt(text="B user: " + rest), fleet(), 0.0)
        assert (choice.engine, choice.reason) == (engine, "near")


class TestRadix:
    def test_a_match_above_the_threshold_is_followed_while_loads_are_balanced(self) -> None:
        strategy = make_strategy("radix")
        engine = send(strategy, Prompt(text=HEAD), fleet())
        loaded = fleet(**{engine: Load(running=64)})
        assert strategy.choose(Prompt(text=HEAD + "x"), loaded, 0.0).engine == engine
        unbalanced = fleet(**{engine: Load(running=65)})
        assert strategy.choose(Prompt(text=HEAD + "x"), unbalanced, 0.0).reason == "unbalanced"

    def test_a_miss_goes_to_the_smallest_tree_however_busy_that_engine_is(self) -> None:
        """sglang issue 14305: the engine that was sent the least text gets every miss, and drowns."""
        strategy = make_strategy("radix")
        for _ in range(2):
            send(strategy, Prompt(text=f"{_}" * 1000), fleet()[:2])
        busy = fleet(c=Load(waiting=60))
        assert strategy.choose(Prompt(text="new" * 100), busy, 0.0).engine == C

    def test_texts_that_part_split_a_node_and_keep_both(self) -> None:
        strategy = make_strategy("radix")
        first = send(strategy, Prompt(text=HEAD + "one" * 400), fleet())
        second = send(strategy, Prompt(text="two" * 600), fleet())
        third = send(strategy, Prompt(text=HEAD + "ten" * 400), fleet())
        assert {first, second, third} == {A, B, C}
        for text, engine in ((HEAD + "one" * 400, first), ("two" * 600, second), (HEAD + "ten" * 400, third)):
            assert strategy.choose(Prompt(text=text), fleet(), 0.0).engine == engine

    def test_eviction_takes_leaves_first_and_keeps_the_bound(self) -> None:
        strategy, one = Radix(max_characters=2000), [Candidate(A)]
        for i in range(40):
            send(strategy, Prompt(text=HEAD + f"{i:02}" * 100), one)
        assert strategy._tree.sizes[A] <= 4000
        assert strategy.choose(Prompt(text=HEAD), [*one, Candidate(B)], 0.0).engine == A


class TestEpp:
    def test_a_full_prefix_outweighs_an_empty_queue_and_half_of_one_does_not(self) -> None:
        """Weights 3 and 2: 3 x 1 > 2 x 1, and 3 x 0.5 < 2 x 1."""
        strategy, prompt = make_strategy("epp"), keyed(range(100))
        engine = send(strategy, prompt, fleet())
        busy = fleet(**{engine: Load(waiting=10)})
        assert strategy.choose(prompt, busy, 0.0).engine == engine
        assert strategy.choose(keyed([*range(50), *range(500, 550)]), busy, 0.0).engine != engine

    def test_it_believes_in_blocks_that_the_engine_has_lost(self) -> None:
        """It estimates: events do not reach it."""
        strategy, prompt = make_strategy("epp"), keyed(range(100))
        engine = send(strategy, prompt, fleet())
        strategy.kv_event(engine, BlocksCleared())
        assert strategy.choose(prompt, fleet(), 0.0).engine == engine

    def test_31250_blocks_of_64_tokens_are_remembered(self) -> None:
        strategy, one = make_strategy("epp"), [Candidate(A)]
        for start in range(0, 34_000, 2000):
            send(strategy, keyed(range(start, start + 2000)), one)
        assert strategy.choose(keyed(range(2000)), one, 0.0).reason == "load"
        assert strategy.choose(keyed(range(32_000, 34_000)), one, 0.0).reason == "prefix"


class TestPrecise:
    def test_the_device_counts_more_than_host_memory(self) -> None:
        strategy = make_strategy("precise")
        strategy.kv_event(A, BlocksStored(range(10), Medium.HOST))
        strategy.kv_event(B, BlocksStored(range(10), Medium.DEVICE))
        assert strategy.choose(keyed(range(10)), fleet(), 0.0).engine == B
        strategy.kv_event(B, BlocksRemoved([0], Medium.DEVICE))
        assert strategy.choose(keyed(range(10)), fleet(), 0.0).engine == A

    def test_siblings_scatter_before_the_first_event(self) -> None:
        """Speculative entries are off by default: what was sent a moment ago is unknown."""
        strategy = make_strategy("precise")
        assert {send(strategy, keyed(range(100)), fleet(), i) for i in range(30)} == {A, B, C}


class TestDynamo:
    def test_cost_is_blocks_to_compute_and_decode_blocks_less_credits(self) -> None:
        strategy = make_strategy("dynamo")
        strategy.kv_event(A, BlocksStored(range(10), Medium.DEVICE))
        strategy.kv_event(B, BlocksStored(range(10), Medium.HOST))
        assert send(strategy, keyed(range(10)), fleet(), 1) == A
        strategy.first_token(1, 0.0)  # 10 decode blocks now: B costs 2.5, C 10
        assert send(strategy, keyed(range(10)), fleet(), 2) == B

    def test_the_lowest_cost_takes_all_where_nothing_sets_engines_apart(self) -> None:
        """No temperature: a long prefix on one engine draws requests until their blocks outweigh it."""
        strategy = make_strategy("dynamo")
        strategy.kv_event(A, BlocksStored(range(1000), Medium.DEVICE))
        prompts = [keyed([*range(1000), 10_000 + i]) for i in range(100)]
        assert {send(strategy, prompt, fleet(), i) for i, prompt in enumerate(prompts)} == {A}
