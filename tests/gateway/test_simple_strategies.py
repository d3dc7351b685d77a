"""Strategies that look at nothing, or at loads alone."""

from kvtier_gateway.routing.registry import make_strategy
from kvtier_gateway.routing.values import Candidate, EngineId, Load, Prompt


def test_round_robin_takes_every_engine_by_turns() -> None:
    strategy, engines = make_strategy("round_robin"), [Candidate(EngineId(name)) for name in "abc"]
    chosen = [strategy.choose(Prompt(), engines, 0.0).engine for _ in range(6)]
    assert sorted(chosen[:3]) == sorted(chosen[3:]) == ["a", "b", "c"]


def test_least_loaded_takes_one_of_the_least_loaded() -> None:
    strategy = make_strategy("least_loaded", seed=1)
    loads = {"a": Load(running=1, waiting=1), "b": Load(running=1), "c": Load(waiting=1)}
    engines = [Candidate(EngineId(name), load) for name, load in loads.items()]
    assert {strategy.choose(Prompt(), engines, 0.0).engine for _ in range(50)} == {"b", "c"}
