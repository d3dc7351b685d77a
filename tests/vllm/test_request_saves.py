"""Which blocks are saved with which step: KV as it becomes full, states where vLLM says that they are. No engine."""

from collections.abc import Sequence
from typing import Any

import pytest
from request_rig import SIZE, known_request
from steps_rig import Planner
from vllm.v1.core.sched.output import CachedRequestData, KVConnectorBlockState, SchedulerOutput

from clock_rig import StillClock
from kvtier.offload import Block
from kvtier.offload.messages import SaveBatch
from kvtier_vllm.compat import BoundaryState, boundary_states
from kvtier_vllm.kv.copies import CopiesUnderWay
from kvtier_vllm.kv.device_blocks import DeviceBlocks
from kvtier_vllm.kv.groups import KVGroups
from kvtier_vllm.requests.known_requests import RequestBlocks
from kvtier_vllm.requests.saves import RequestSaves
from kvtier_vllm.steps.step_plan import ComputedSpan, written_blocks

GROUPS = KVGroups(3, 100, frozenset((0, 2)))
"""KV in the middle, states before and after it."""
TABLES = ([0, 0, 9, 12], [1, 2, 3, 4], [0, 0, 19, 22])
"""Device blocks of a request. Blocks of states say nothing: the third is at the end of the second block, say."""
TOKENS = range(14)
"""Three blocks and a half."""
ROOM = 50


class Saving:
    """What is saved of a request that vLLM has in `TABLES`."""

    def __init__(self, *, save_answers: bool = True, params: dict[str, Any] | None = None) -> None:
        self.clock = StillClock()
        self.known = known_request(TOKENS, params)
        self.num_computed = 0
        self.device = DeviceBlocks(GROUPS, SIZE)
        self.device.fill(range(1, GROUPS.num_blocks), self.device.epoch)
        self.saves = RequestSaves(
            RequestBlocks(GROUPS, None),
            GROUPS,
            self.device,
            tokens_per_block=SIZE,
            save_answers=save_answers,
            clock=self.clock,
        )
        kv: Any = self
        self.saves.bind(kv)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """As vLLM's own manager of device blocks."""
        assert request_id == self.known.request.request_id
        return TABLES

    def choose(
        self,
        states: Sequence[BoundaryState] = (),
        *,
        num_computed: int | None = None,
        written: Sequence[int] = (),
        room: int = ROOM,
    ) -> list[Block]:
        """:param num_computed: after the step; None: the request is not in it."""
        computed = []
        if num_computed is not None:
            span = ComputedSpan(self.known.request.request_id, self.num_computed, num_computed, None)
            computed, self.num_computed = [(self.known, span)], num_computed
        return self.saves.choose(computed, [(self.known, states)], set(written), room)

    def block(self, group: int, position: int, device_block: int) -> Block:
        return GROUPS.block(self.known.keys.first(position + 1)[position], group, device_block)


def _kv(saving: Saving, *positions: int) -> list[Block]:
    return [saving.block(1, position, TABLES[1][position]) for position in positions]


def test_keys_and_slots_differ_by_group() -> None:
    saving = Saving()
    blocks = [saving.block(group, 0, 7) for group in range(3)]
    assert [slot for _, slot in blocks] == [7, 107, 207]
    assert [key for key, _ in blocks] == GROUPS.keys(saving.known.keys.first(1))
    assert len({key for key, _ in blocks}) == 3
    assert GROUPS.of_tokens == [1]


def test_kv_is_saved_by_tables_and_states_where_they_are_said_to_be() -> None:
    saving = Saving()
    states = [BoundaryState(0, 9, 2 * SIZE), BoundaryState(2, 19, 2 * SIZE)]
    expected = [saving.block(0, 1, 9), saving.block(2, 1, 19), *_kv(saving, 0, 1)]
    assert saving.choose(states, num_computed=2 * SIZE) == expected
    assert saving.choose(num_computed=len(TOKENS)) == _kv(saving, 2)
    saving.known.request.num_computed_tokens = len(TOKENS)
    saving.saves.leave(saving.known, TABLES)
    assert not saving.saves.unsaved, "a table says nothing of states"


def test_states_wait_for_room_unless_they_are_overwritten() -> None:
    saving = Saving()
    states = [BoundaryState(0, 9, SIZE), BoundaryState(2, 19, SIZE)]
    assert saving.choose(states, room=0) == []
    assert saving.saves.is_worth_a_step
    assert saving.choose(room=1) == [saving.block(0, 0, 9)]
    assert saving.choose(written=[19]) == []
    assert not saving.saves.unsaved


def test_a_state_is_saved_by_the_step_that_writes_it() -> None:
    saving = Saving()
    assert saving.choose([BoundaryState(0, 9, SIZE)], written=[9]) == [saving.block(0, 0, 9)]


def test_what_stands_for_no_block_is_not_saved() -> None:
    saving = Saving()
    within = BoundaryState(0, 9, SIZE + 1)
    unknown = BoundaryState(0, 9, 4 * SIZE)
    """The state of a token that the scheduler has not heard of, as when it plans ahead."""
    assert saving.choose([within, unknown]) == []
    saving.known.request.append_output_token_ids([1, 2])
    assert saving.choose([unknown]) == [saving.block(0, 3, 9)]


@pytest.mark.parametrize("params", [{"kvtier": {"no_store": True}}, None])
def test_clients_decide_whether_states_are_saved(params: dict[str, Any] | None) -> None:
    saving = Saving(params=params)
    assert bool(saving.choose([BoundaryState(0, 9, SIZE)])) == (params is None)


def test_states_of_answers_are_saved_as_their_blocks_are() -> None:
    for save_answers in (False, True):
        saving = Saving(save_answers=save_answers)
        saving.known.request.append_output_token_ids([1, 2])
        assert len(saving.choose([BoundaryState(0, 9, 3 * SIZE), BoundaryState(0, 8, 4 * SIZE)])) == 1 + save_answers


def _output(**fields: Any) -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    for name, value in fields.items():
        setattr(output, name, value)
    return output


def test_what_vllm_says_of_states() -> None:
    said = {"a": [(0, 9, 8), (2, 19, 8)], "b": [(0, 7, 4)]}
    state = KVConnectorBlockState({"a", "b"}, lambda request_id: TABLES, said)
    assert boundary_states(_output(kv_connector_block_state=state)) == {
        "a": [BoundaryState(0, 9, 8), BoundaryState(2, 19, 8)],
        "b": [BoundaryState(0, 7, 4)],
    }
    assert boundary_states(_output()) == {}


def test_blocks_that_a_step_clears_are_written_to() -> None:
    """Also those of no request in it: one that was given them may have been preempted before the step began."""
    cached = CachedRequestData(
        req_ids=["a"],
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[([5], [6])],
        num_computed_tokens=[8],
        num_output_tokens=[0],
    )
    assert written_blocks(_output(scheduled_cached_reqs=cached, new_block_ids_to_zero=[6, 7]), SIZE) == {5, 6, 7}
    assert written_blocks(_output(scheduled_cached_reqs=cached), SIZE) == {5, 6}


def test_blocks_of_an_ended_request_that_another_connector_loads_into() -> None:
    """Two wait to be saved and one is being copied when they are given to a request that kvtier knows nothing of.

    It is in no step before its load is over, and its allocation names no tokens that kvtier is to load.
    """
    groups = KVGroups(1, 100)
    plan, known = Planner(groups, {"id"}, {"id": ([5, 6, 7, 8],)}), known_request(TOKENS)
    saves = RequestSaves(
        RequestBlocks(groups, None), groups, plan.device, tokens_per_block=SIZE, save_answers=True, clock=StillClock()
    )
    kv: Any = plan
    saves.bind(kv)
    copies = CopiesUnderWay(groups)
    written = plan.begin(new={"id": (0, len(TOKENS))})
    span = ComputedSpan("id", 0, len(TOKENS), plan.tables["id"])
    ((key, slot),) = saves.choose([(known, span)], [], written, 1)
    copies.begin([SaveBatch(1, [], [key], [0], [slot])])
    plan.end()
    known.request.num_computed_tokens = len(TOKENS)
    saves.leave(known, ([5, 6, 7, 8],))
    assert list(saves.unsaved) == [6, 7]
    plan.load("theirs", [5, 6, 9])
    written = plan.begin(finished=["id"])
    assert copies.of(written) == [1], "the step does not wait for the copy"
    assert [slot for _, slot in saves.choose([], [], written, ROOM)] == [7]
    plan.end()
    plan.step(new={"theirs": (3 * SIZE - 1, 3 * SIZE)})
    assert saves.choose([], [], set(), ROOM) == []
