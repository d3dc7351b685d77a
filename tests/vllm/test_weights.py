"""Which weights a worker has after everything that may change them. No engine."""

from collections.abc import Callable

import pytest
from weights_rig import Model, model_in

from kvtier_vllm.messages import WeightsState
from kvtier_vllm.weights.weights import Change

model = pytest.fixture(model_in)


def test_weights_from_files_are_what_is_in_them(model: Model) -> None:
    first = model.weights.state
    again = model.reload()
    assert (again.namespace, again.generation) == (first.namespace, 2)
    model.write(1)
    other = model.reload()
    assert other.namespace not in (None, first.namespace)
    model.write(0)
    assert model.reload().namespace == first.namespace


def test_files_that_change_while_they_are_read_say_nothing(model: Model) -> None:
    state = model.reload(meanwhile=lambda: model.write(1))
    assert state.namespace is None
    assert "have changed while" in state.why
    assert model.reload().namespace is not None


def test_a_part_of_the_weights_is_not_all_of_them(model: Model) -> None:
    """vLLM leaves the others as they were."""
    model.write(1, name="another weight")
    assert model.reload().namespace is None


def test_a_change_that_fails_leaves_weights_unknown(model: Model) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        model.reload(meanwhile=fail)
    assert model.weights.state == WeightsState(2, None, "reload_weights failed")
    assert model.reload().namespace is not None


def test_what_happens_within_a_change_counts(model: Model) -> None:
    def change(kind: Change) -> Callable[[], None]:
        def nested() -> None:
            with model.weights.changing("load_weights", kind):
                pass

        return nested

    first = model.weights.state.namespace
    assert model.reload(meanwhile=change(Change.UNKNOWN)).namespace == first, "this is how files are loaded"
    with model.weights.changing("wake_up", Change.NONE):
        change(Change.UNKNOWN)()
    assert model.weights.state.namespace is None
    model.weights.forget_device("an adapter")
    assert model.weights.state.namespace is None
    assert model.reload().namespace == first
    generation = model.weights.state.generation
    model.weights.forget_device("an adapter")
    assert (model.weights.state.namespace, model.weights.state.generation) == (first, generation + 2)
