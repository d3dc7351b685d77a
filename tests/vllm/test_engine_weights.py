"""What all ranks together say about an engine's weights. No engine."""

from kvtier_vllm.messages import WeightsState
from kvtier_vllm.weights.engine_weights import EngineWeights


def test_all_ranks_say_which_weights_an_engine_has() -> None:
    weights = EngineWeights([b"one", b"two"])
    assert (weights.digest, weights.are_known, weights.generations) == (None, True, [0, 0])
    weights.note({0: WeightsState(2, b"three", ""), 1: WeightsState(2, b"four", "")})
    other = weights.digest
    assert other is not None
    weights.note({1: WeightsState(3, None, "update_weights")})
    assert (weights.are_known, weights.generations) == (False, [2, 3])
    weights.note({0: WeightsState(5, b"one", ""), 1: WeightsState(5, b"two", "")})
    assert (weights.digest, weights.are_known) == (None, True)
    weights.note({0: WeightsState(7, b"three", ""), 1: WeightsState(7, b"four", "")})
    assert weights.digest == other
