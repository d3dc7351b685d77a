"""Which device blocks count as computed before kvtier's eyes, step by step as vLLM plans them. No engine.

Orders of asynchronous scheduling are here too, where a step begins before the one before it has ended: vLLM turns that
off on the CPU.
"""

import pytest
from request_rig import SIZE
from steps_rig import Planner

from kvtier_vllm.compat import BoundaryState
from kvtier_vllm.kv.groups import KVGroups

ONE_GROUP = KVGroups(1, 100)


def planner(**tables: list[int]) -> Planner:
    """A planner that knows requests with these device blocks."""
    return Planner(ONE_GROUP, set(tables), {request_id: (table,) for request_id, table in tables.items()})


def tokens(start: float, stop: float) -> tuple[int, int]:
    """In blocks."""
    return int(start * SIZE), int(stop * SIZE)


def test_blocks_are_seen_once_they_are_full() -> None:
    plan = planner(a=[1, 2, 3])
    plan.step(new={"a": tokens(0, 1.5)})
    assert plan.seen() == {1}
    plan.step(running={"a": tokens(1.5, 2)})
    assert plan.seen() == {1, 2}
    for token in range(SIZE):
        assert plan.seen() == {1, 2}
        plan.step(running={"a": (2 * SIZE + token, 2 * SIZE + token + 1)})
    assert plan.seen() == {1, 2, 3}


def test_blocks_that_are_handed_out_are_foreign() -> None:
    """To whomever, and in whichever way vLLM does it."""
    plan = planner(a=list(range(1, 9)), b=[1, 2], c=[9, 3], d=[9, 4])
    plan.step(new={"a": tokens(0, 8)})
    plan.load("b", [1, 2])
    plan.begin()
    assert plan.seen() == {3, 4, 5, 6, 7, 8}
    plan.begin(new={"c": tokens(0.5, 1)})
    assert plan.seen() == {4, 5, 6, 7, 8}
    plan.begin(resumed={"d": tokens(0.5, 1)})
    assert plan.seen() == {5, 6, 7, 8}
    plan.begin(running={"d": tokens(1, 1.5)}, fresh={"d": ([5],)})
    assert plan.seen() == {6, 7, 8}
    plan.begin(cleared=[6])
    assert plan.seen() == {7, 8}


def test_what_vllm_finds_on_the_device_keeps_what_it_was() -> None:
    """Seen blocks stay seen for whoever hits them, and foreign ones foreign, also for a third request."""
    plan = planner(a=[1, 2, 3, 4], b=[1, 2, 5, 6], c=[1, 2, 5, 7])
    plan.step(new={"a": tokens(0, 2)}, finished=[])
    plan.load("b", [1, 2, 5, 6], num_local=2 * SIZE)
    plan.step(finished=["a"])
    plan.step(new={"b": tokens(3, 3.5)})
    assert plan.seen() == {1, 2}
    plan.step(new={"c": tokens(3, 4)}, finished=["b"])
    assert plan.seen() == {1, 2, 7}


def test_what_is_computed_on_top_of_an_asynchronous_load_is_seen() -> None:
    """vLLM has dealt with its failures before it schedules the request."""
    plan = planner(a=[1, 2, 3, 4])
    plan.load("a", [1, 2])
    plan.begin()
    plan.end(2)  # the second block has failed: it is computed
    plan.tables["a"] = ([1, 2, 3, 4],)
    plan.step(new={"a": tokens(1, 3.5)})
    assert plan.seen() == {2, 3}


def test_a_whole_prompt_that_was_loaded() -> None:
    """vLLM computes its last token anew: a block that was not computed as a whole is not seen."""
    plan = planner(a=[1, 2])
    plan.load("a", [1, 2])
    plan.begin()
    plan.end()
    plan.step(new={"a": (2 * SIZE - 1, 2 * SIZE)})
    plan.step(running={"a": tokens(2, 3)}, fresh={"a": ([3],)})
    assert plan.seen() == {3}


def test_kvtiers_own_loads() -> None:
    plan = planner(a=[1, 2, 3])
    plan.load("a", [1, 2])
    plan.step()
    plan.device.fill([1], plan.device.epoch)
    assert plan.seen() == {1}
    plan.load("b", [1])
    plan.begin()
    assert plan.seen() == set()


def test_requests_whose_kv_is_not_kept_leave_blocks_for_others_to_keep() -> None:
    """But for those with media: nobody here has looked whether vLLM's name of a medium is its content."""
    plan = planner(a=[1, 2, 3], c=[4, 5, 6])
    plan.tables |= {"b": ([1, 2],), "d": ([4, 5],)}
    plan.step(new={"b": tokens(0, 2), "d": tokens(0, 1)}, with_media=["d"])
    plan.step(new={"a": tokens(2, 3), "c": tokens(2, 3)}, running={"d": tokens(1, 2)}, with_media=["a"])
    assert plan.seen() == {1, 2, 3, 6}
    plan.tables["d"] = ([7],)
    plan.step(finished=["d"])
    plan.step(new={"d": tokens(0, 1)})
    assert plan.seen() == {1, 2, 3, 6, 7}, "another request may have that id"


def test_adapters_that_nobody_has_looked_at_leave_nothing_that_others_could_keep() -> None:
    """vLLM calls their blocks by name and path, which may be those of another adapter."""
    plan = planner(a=[1, 2, 3])
    plan.tables |= {"b": ([1, 2],), "c": ([4],)}
    plan.step(new={"b": tokens(0, 2), "c": tokens(0, 1)}, with_adapter=["b"])
    assert plan.seen() == {4}
    plan.step(new={"a": tokens(2, 3)}, finished=["b", "c"], with_adapter=["a"])
    assert plan.seen() == {4}, "it attends to what was computed with another adapter"
    plan.tables["b"] = ([5],)
    plan.step(new={"b": tokens(0, 1)}, finished=["a"])
    assert plan.seen() == {4, 5}, "another request may have that id"


@pytest.mark.parametrize("loads_within", [False, True])
def test_a_request_whose_adapter_becomes_another_one_is_called_by_the_first_for_good(loads_within: bool) -> None:
    plan = planner(a=[1, 2], b=[3, 4], c=[5, 6], d=[1, 7])
    plan.begin(new={"a": tokens(0, 1), "b": tokens(0, 1), "c": tokens(0, 1)}, with_adapter=["a", "b"])
    plan.known.remove("a")
    plan.device.forget_all(plan.number, plan.known)
    plan.end()
    assert plan.seen() == {3, 5}, "the step came after the change, and two have what they were added with"
    plan.begin(resumed={"a": tokens(0, 2)}, running={"b": tokens(1, 2), "c": tokens(1, 2)}, loads_within=loads_within)
    assert plan.awaited() == ({4, 6} if loads_within else set())
    plan.end()
    assert plan.seen() == {3, 4, 5, 6}
    plan.step(new={"d": tokens(1, 2)}, with_adapter=["d"])
    assert plan.seen() == {3, 4, 5, 6}, "its first block has the name of the first adapter and is of the other"


def test_a_load_that_filled_a_block_says_nothing_of_who_has_it_next() -> None:
    """Another connector loads within the steps, and two of them are under way."""
    plan = planner(a=[1])
    plan.load("c", [5])
    plan.begin(new={"a": tokens(0, 1)}, loads_within=True)
    plan.device.fill([5], plan.device.epoch)
    plan.load("b", [5, 6])
    plan.begin(new={"b": tokens(1, 2)}, loads_within=True)
    plan.end()
    assert plan.seen() == {1}
    assert plan.awaited() == {6}
    plan.end(5)
    assert plan.seen() == {1}


def test_a_load_within_a_step_is_waited_for() -> None:
    plan = planner(a=[1, 2, 3], b=[4])
    plan.load("a", [1, 2, 3])
    plan.begin(new={"a": tokens(1, 3), "b": tokens(0, 1)}, loads_within=True)
    assert plan.seen() == set()
    assert plan.awaited() == {2, 3, 4}
    plan.end()
    assert plan.seen() == {2, 3, 4}
    assert plan.awaited() == set()


def test_a_load_within_a_step_that_has_failed() -> None:
    """What was computed on top of it is not seen, by whichever request; what is computed in its place is."""
    plan = planner(a=[1, 2, 3, 4], b=[1, 2, 5], c=[6])
    plan.load("a", [1, 2, 3, 4])
    plan.begin(new={"a": tokens(2, 3), "b": tokens(2, 3), "c": tokens(0, 1)}, loads_within=True)
    plan.end(2)
    assert plan.seen() == {6}
    plan.step(running={"a": tokens(1, 3), "b": tokens(2, 3)})
    assert plan.seen() == {2, 3, 5, 6}
    plan.step(running={"a": tokens(3, 4)})
    assert plan.seen() == {2, 3, 4, 5, 6}, "the first block was loaded by somebody else"


def test_who_hits_what_was_never_filled_is_not_saved() -> None:
    """vLLM leaves it in its own prefix cache, also when the request that would compute it anew is aborted."""
    plan = planner(a=[1, 2, 3], b=[1, 2, 4], c=[1, 2, 4, 5], d=[6])
    plan.load("a", [1, 2, 3])
    plan.begin(new={"a": tokens(2, 3)}, loads_within=True)
    plan.end(2)
    plan.step(new={"b": tokens(2, 3)}, finished=["a"])
    plan.step(new={"c": tokens(3, 4)}, finished=["b"])
    assert plan.seen() == set()
    plan.load("d", [2])
    plan.step(finished=["c"])
    plan.tables["d"] = ([2, 6],)
    plan.step(new={"d": tokens(1, 2)})
    assert plan.seen() == {6}, "the block was handed out anew meanwhile"


def test_what_a_tainted_request_computes_is_not_sound_for_requests_of_the_same_step() -> None:
    """With sliding windows alone, they need nothing of what it attends to. vLLM lists those that begin first."""
    plan = planner(a=[1, 2], b=[0, 0, 3, 4, 5], c=[0, 0, 0, 4, 5, 6], d=[7])
    plan.step(new={"a": tokens(0, 2)})
    plan.device.forget_all()
    begin = {"c": tokens(5, 6), "b": tokens(4, 5), "d": tokens(0, 1)}
    plan.step(new=begin, running={"a": tokens(2, 4)}, fresh={"a": ([3, 4],)})
    assert plan.seen() == {7}
    plan.tables["e"] = ([0, 0, 0, 0, 0, 6, 8],)
    plan.step(new={"e": tokens(6, 7)})
    assert plan.seen() == {7}


@pytest.mark.parametrize("is_lost", [False, True])
def test_steps_planned_ahead_wait_too(is_lost: bool) -> None:
    """The second step begins while the first one loads; the third one loads as well."""
    plan = planner(a=[1, 2, 3, 4], b=[5], c=[6, 7], d=[8])
    plan.load("a", [1, 2, 3])
    plan.begin(new={"a": tokens(2, 2.5)}, loads_within=True)
    plan.begin(running={"a": tokens(2.5, 3)}, new={"b": tokens(0, 1)})
    assert plan.awaited() == {3, 5}
    plan.end(*[2] * is_lost)
    assert plan.seen() == ({5} if is_lost else {3, 5})
    plan.load("c", [6, 7])
    plan.begin(new={"c": tokens(1, 2)}, loads_within=True)
    plan.end()
    plan.begin(new={"d": tokens(0, 1)})
    assert plan.awaited() == {7, 8}
    plan.end()
    assert plan.seen() == ({5, 7, 8} if is_lost else {3, 5, 7, 8})
    assert plan.awaited() == set()


def test_blocks_handed_out_while_a_step_is_waited_for() -> None:
    """A request is preempted by the step after its own, and its blocks go to one that another connector loads."""
    plan = planner(a=[1, 2], b=[3])
    plan.begin(new={"b": tokens(0, 1)})
    plan.begin(new={"a": tokens(0, 2)}, loads_within=True)
    plan.device.fill([4], plan.device.epoch)
    plan.load("c", [2, 3, 4])
    plan.begin()
    assert plan.seen() == set()
    for _ in range(3):
        plan.end()
    assert plan.seen() == {1}


def test_drafted_tokens_that_are_rejected() -> None:
    """The next step begins where the last one was right, and a block is seen when its last token was computed."""
    plan = planner(a=[1, 2, 3])
    plan.step(new={"a": (0, SIZE - 1)})
    plan.step(running={"a": (SIZE - 1, SIZE + 2)})
    plan.step(running={"a": (SIZE, SIZE + 3)})
    assert plan.seen() == {1}
    plan.step(running={"a": (SIZE + 3, 2 * SIZE + 2)})
    plan.step(running={"a": (2 * SIZE - 1, 2 * SIZE + 2)})
    assert plan.seen() == {1, 2}


def test_after_a_change_of_weights_nothing_counts() -> None:
    plan = planner(a=[1, 2, 3], b=[1, 4], c=[5])
    plan.load("d", [6])
    plan.step(new={"a": tokens(0, 2)})
    epoch = plan.device.epoch
    plan.device.forget_all()
    assert plan.seen() == set()
    plan.device.fill([6], epoch)
    plan.tables["d"] = ([6, 7],)
    plan.known.add("d")
    plan.step(running={"a": tokens(2, 3)}, new={"b": tokens(1, 2), "c": tokens(0, 1), "d": tokens(1, 2)})
    assert plan.seen() == {5}, "only what was computed afterwards, on top of nothing from before"
    plan.step(resumed={"a": tokens(0, 3)})
    assert plan.seen() == {1, 2, 3, 5}, "it was preempted, and computed from its beginning"


def test_a_change_of_weights_while_steps_are_under_way() -> None:
    plan = planner(a=[1], b=[2, 3])
    plan.begin(new={"a": tokens(0, 1)}, loads_within=True)
    plan.begin(new={"b": tokens(0, 1)})
    plan.device.forget_all()
    for _ in range(2):
        plan.end()
    plan.step(running={"b": tokens(1, 2)})
    assert plan.seen() == set()
    assert plan.awaited() == set()


@pytest.mark.parametrize("loads_within", [False, True])
def test_steps_that_ran_after_a_change_count(loads_within: bool) -> None:
    """The scheduler hears of a change with the results of the first step after it, when another is under way."""
    plan = planner(a=[1, 2, 3], b=[4, 5], c=[4, 6])
    plan.step(new={"a": tokens(0, 1)})
    plan.begin(running={"a": tokens(1, 2)})
    plan.begin(running={"a": tokens(2, 2.5)}, new={"b": tokens(0, 1)}, loads_within=loads_within)
    since = plan.number
    plan.begin(running={"a": tokens(2.5, 3), "b": tokens(1, 2)}, new={"c": tokens(1, 2)})
    plan.end()
    plan.device.forget_all(since)
    for _ in range(2):
        plan.end()
    assert plan.seen() == {4, 5, 6}, "and nothing of the request that began before"


def test_groups_have_blocks_of_their_own() -> None:
    """Full attention, a sliding window that has passed over its first blocks, and states."""
    groups = KVGroups(3, 100, frozenset((2,)))
    plan = Planner(groups, {"a"}, {"a": ([1, 2, 3], [0, 12, 13], [0, 22, 23])})
    state = BoundaryState(2, 22, 2 * SIZE)
    plan.step(new={"a": tokens(0, 2)}, states={"a": [state]})
    assert plan.seen() == {1, 2, 12, 22}
    plan.step(running={"a": tokens(2, 3)}, states={"a": [BoundaryState(2, 23, 3 * SIZE)]})
    assert plan.seen() == {1, 2, 3, 12, 13, 22, 23}


def test_a_state_that_was_loaded_is_not_seen() -> None:
    """vLLM says where it is as soon as it has it, whoever brought it."""
    groups = KVGroups(2, 100, frozenset((1,)))
    plan = Planner(groups, {"a"})
    plan.load("a", [1, 2], [0, 12])
    plan.step()
    plan.tables["a"] = ([1, 2, 3], [0, 12, 13])
    states = [BoundaryState(1, 12, 2 * SIZE), BoundaryState(1, 13, 3 * SIZE)]
    plan.step(new={"a": tokens(2, 3)}, states={"a": states, "b": states})
    assert plan.seen() == {3, 13}
