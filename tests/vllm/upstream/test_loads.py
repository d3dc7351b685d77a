"""The life of a request whose prefix is loaded, as vLLM's scheduler sees it."""

import socket
import threading
from collections.abc import Callable

import pytest
from stepping_rank import BLOCK
from stepping_rig import Engine
from vllm.v1.request import RequestStatus

Start = Callable[..., Engine]
MODES = pytest.mark.parametrize("mode", [{}, {"async_scheduling": True}], ids=["plain", "asynchronous"])


def fill(start: Start, *prompts: tuple[int, int], common: int = 0, num_ranks: int = 1) -> None:
    """An engine that has computed these prompts (number and length) and is gone; what it saved is on disk."""
    engine = start(disk=True, num_ranks=num_ranks)
    for number, num_tokens in prompts:
        engine.ask(number, num_tokens, common=common)
    engine.finish()
    engine.require_right_answers()
    engine.close()


@MODES
@pytest.mark.parametrize("num_tokens", [7, 16, 17, 95, 96, 97, 600])
def test_what_was_saved_is_loaded(start: Start, num_tokens: int, mode: dict[str, bool]) -> None:
    engine = start(**mode)
    engine.ask(1, num_tokens)
    engine.finish()
    engine.forget_device()
    again = engine.ask(1, num_tokens)
    engine.step()
    num_hits = (num_tokens - 1) // BLOCK
    assert engine.is_loading(again) == (num_hits > 0)
    assert engine.requests[again].num_computed_tokens >= num_hits * BLOCK
    engine.finish()
    assert engine.received == ({again: 1} if num_hits else {})
    engine.require_right_answers()


def require_no_detour(engine: Engine) -> None:
    """A request is scheduled by the first step that is planned after a worker's answer that its blocks are there."""
    engine.ask(1, 100)
    engine.finish()
    engine.forget_device()
    loaded: list[object] = []
    engine.note_loaded(loaded)
    again = engine.ask(1, 100)
    engine.until(lambda: bool(loaded), "its blocks are there")
    if engine.is_loading(again) and engine.is_planning_ahead:
        assert again not in engine.step().num_scheduled_tokens, "planned before its results were known"
    assert again in engine.step().num_scheduled_tokens
    engine.finish()
    assert engine.received == {again: 1}
    engine.require_right_answers()


@MODES
def test_a_load_is_over_in_the_same_round(start: Start, mode: dict[str, bool]) -> None:
    require_no_detour(start(**mode))


@MODES
def test_others_run_while_a_load_is_under_way(start: Start, mode: dict[str, bool]) -> None:
    fill(start, (1, 100))
    engine = start(disk=True, **mode)
    disk = engine.ranks[0].hold_disk()
    disk.gate.clear()
    loading, other = engine.ask(1, 100), engine.ask(2, 100)
    engine.until(lambda: engine.requests[other].is_finished(), "the other one has its answer")
    assert engine.is_loading(loading)
    disk.gate.set()
    engine.finish()
    assert engine.received == {loading: 1}
    engine.require_right_answers()


@MODES
def test_two_with_the_same_prefix_load_it_at_the_same_time(start: Start, mode: dict[str, bool]) -> None:
    """The second finds blocks that the first has under way: neither attends to what has not arrived."""
    fill(start, (1, 100))
    engine = start(disk=True, **mode)
    disk = engine.ranks[0].hold_disk()
    disk.gate.clear()
    first = engine.ask(1, 100)
    engine.step()
    second = engine.ask(1, 100)
    for _ in range(5):
        engine.step()
    assert engine.is_loading(first)
    disk.gate.set()
    engine.finish()
    assert engine.received[first] == 1
    assert engine.answers[first] == engine.answers[second]
    engine.require_right_answers()


def test_a_prefix_that_is_on_its_way_already_is_not_computed(start: Start) -> None:
    fill(start, (1, 100))
    engine = start(disk=True)
    requests = [engine.ask(1, 100) for _ in range(3)]
    engine.finish()
    engine.require_right_answers()
    assert [engine.spared[request_id] for request_id in requests] == [6 * BLOCK] * 3


def test_nobody_waits_for_a_lookup_but_who_asked(start: Start) -> None:
    """A pool that takes connections and never answers: the request is asked about in every step, and then computed."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        engine = start(pool=address, client={"call_timeout_s": 4.0}, lookup_deadline_s=3.0)
        looking = engine.ask(1, 100)
        engine.step()
        assert engine.requests[looking].status == RequestStatus.WAITING
        other = engine.ask(2, 7)  # not a whole block: nothing to look for
        engine.until(lambda: engine.requests[other].is_finished(), "the other one has its answer")
        assert engine.requests[looking].status == RequestStatus.WAITING
        aborted = engine.ask(3, 100)
        engine.step()
        engine.abort(aborted)
        engine.finish()
        engine.require_right_answers()
        assert not engine.received
        engine.close()


@MODES
def test_an_abort_during_a_load(start: Start, mode: dict[str, bool]) -> None:
    """The blocks stay with the request until the load keeps off them, and go to nobody else before."""
    fill(start, (1, 160))
    engine = start(disk=True, num_blocks=12, **mode)
    disk = engine.ranks[0].hold_disk()
    disk.gate.clear()
    aborted = engine.ask(1, 160)
    engine.until(disk.entered.is_set, "the load is under way")
    engine.abort(aborted)
    other = engine.ask(2, 60)
    for _ in range(5):
        engine.step()
    disk.gate.set()
    engine.finish()
    assert engine.received == {aborted: 1}
    assert engine.reasons[other] == "length"
    engine.require_right_answers()


@MODES
def test_an_abort_before_the_load_was_heard_of(start: Start, mode: dict[str, bool]) -> None:
    """Aborted between `schedule` and the workers' step."""
    engine = start(**mode)
    engine.ask(1, 100)
    engine.finish()
    engine.forget_device()
    aborted = engine.ask(1, 100)
    output = engine.scheduler.schedule()
    engine.abort(aborted)
    engine.scheduler.update_from_output(output, engine.ranks[0].execute(output))
    engine.finish()
    engine.require_right_answers()
    assert engine.requests[aborted].status == RequestStatus.FINISHED_ABORTED


@MODES
def test_a_load_that_ends_late_is_given_up(start: Start, mode: dict[str, bool]) -> None:
    fill(start, (1, 100))
    engine = start(disk=True, load_deadline_s=0.2, **mode)
    disk = engine.ranks[0].hold_disk()
    disk.gate.clear()
    loading = engine.ask(1, 100)
    engine.until(lambda: engine.requests[loading].is_finished(), "it was computed instead")
    disk.gate.set()
    engine.finish()
    assert engine.received == {loading: 1}
    engine.require_right_answers()


@MODES
def test_preemption_frees_blocks_that_are_still_being_copied(start: Start, mode: dict[str, bool]) -> None:
    """More requests than blocks, and copies to host memory that begin late: who gets such a block waits for it."""
    engine = start(num_blocks=20, **mode)
    gate = threading.Event()
    engine.ranks[0].hold_copies_out(gate)
    opener = threading.Timer(0.3, gate.set)
    opener.start()
    for number in range(1, 5):
        engine.ask(number, 5 * BLOCK, max_tokens=40)
    engine.finish()
    opener.join()
    assert engine.num_preemptions > 0
    engine.require_right_answers()
    # What was saved is right, too.
    for number in range(1, 5):
        engine.forget_device()
        engine.ask(number, 5 * BLOCK, max_tokens=40)
        engine.finish()
    engine.require_right_answers()
    assert len(engine.received) >= 4


@MODES
def test_a_load_into_blocks_that_are_still_being_copied(start: Start, mode: dict[str, bool]) -> None:
    fill(start, (2, 160))
    engine = start(disk=True, num_blocks=16, **mode)
    gate = threading.Event()
    engine.ranks[0].hold_copies_out(gate)
    first = engine.ask(1, 160, max_tokens=2)
    engine.until(lambda: engine.requests[first].is_finished(), "its blocks are free")
    opener = threading.Timer(0.3, gate.set)
    opener.start()
    loaded = engine.ask(2, 160, max_tokens=2)
    engine.finish()
    opener.join()
    assert engine.received == {loaded: 1}
    engine.forget_device()
    again = engine.ask(1, 160, max_tokens=2)
    engine.finish()
    assert engine.spared[again] == 9 * BLOCK
    engine.require_right_answers()


@MODES
def test_a_last_block_that_is_taken_over_at_once(start: Start, mode: dict[str, bool]) -> None:
    """It was full with the request's end; the next step already writes another request's KV to it."""
    engine = start(num_blocks=12, **mode)
    prompt, max_tokens = 10 * BLOCK - 10, 11
    first = engine.ask(1, prompt, max_tokens=max_tokens)
    engine.ask(2, 10 * BLOCK, max_tokens=max_tokens)  # wants all blocks there are
    engine.finish()
    engine.forget_device()
    turn = engine.continue_with(first, max_tokens=8)
    engine.finish()
    assert engine.spared[turn] in (9 * BLOCK, 10 * BLOCK)
    engine.require_right_answers()


@MODES
@pytest.mark.parametrize("save_answers", [True, False])
def test_answers_are_kept_if_they_are_wanted(start: Start, save_answers: bool, mode: dict[str, bool]) -> None:
    engine = start(save_answers=save_answers, **mode)
    first = engine.ask(1, 5 * BLOCK + 3, max_tokens=4 * BLOCK)
    engine.finish()
    engine.forget_device()
    turn = engine.continue_with(first, max_tokens=8)
    engine.finish()
    assert engine.spared[turn] == (9 if save_answers else 5) * BLOCK
    engine.require_right_answers()


@MODES
def test_preempted_while_others_load(start: Start, mode: dict[str, bool]) -> None:
    """Prefixes come by loads, decoding needs more blocks than there are: preempted requests load again."""
    fill(start, *[(number, 5 * BLOCK) for number in range(1, 7)])
    engine = start(disk=True, num_blocks=20, **mode)
    for _ in range(3):
        for number in range(1, 7):
            engine.ask(number, 5 * BLOCK, max_tokens=60)
        engine.until(lambda: not engine.scheduler.has_requests(), "all have ended")
        engine.forget_device()
    engine.finish()
    assert engine.num_preemptions > 0
    assert max(engine.received.values()) > 1
    engine.require_right_answers()


@MODES
def test_a_block_that_fills_in_a_step_without_a_new_block_is_saved(start: Start, mode: dict[str, bool]) -> None:
    engine = start(**mode)
    engine.ask(1, 3 * BLOCK - 1, max_tokens=2)
    engine.finish()
    engine.forget_device()
    engine.ask(1, 3 * BLOCK - 1, max_tokens=2)
    again = engine.requests[engine.ask(1, 3 * BLOCK - 1, max_tokens=40)]
    engine.finish()
    engine.require_right_answers()
    assert again.num_computed_tokens > 3 * BLOCK


@MODES
def test_reset_with_loads_and_saves_in_flight(start: Start, mode: dict[str, bool]) -> None:
    fill(start, (1, 100))
    engine = start(disk=True, **mode)
    disk = engine.ranks[0].hold_disk()
    disk.gate.clear()
    loading = engine.ask(1, 100)
    saving = engine.ask(2, 100)
    engine.until(disk.entered.is_set, "the load is under way")
    assert engine.connector.reset_cache() is not False
    disk.gate.set()
    engine.finish()
    engine.require_right_answers()
    assert engine.received == {loading: 1}
    engine.forget_device()
    for number in (1, 2):
        engine.ask(number, 100)
    assert saving in engine.answers
    engine.finish()
    engine.require_right_answers()


@MODES
def test_what_waits_to_be_saved_is_never_more_than_the_device_has(start: Start, mode: dict[str, bool]) -> None:
    """Copies to host memory hang, and the same prompt comes again and again."""
    engine = start(num_blocks=20, num_host_blocks=16, **mode)
    gate = threading.Event()
    engine.ranks[0].hold_copies_out(gate)
    for _ in range(6):
        asked = engine.ask(1, 160, max_tokens=2)
        engine.until(engine.requests[asked].is_finished, "it has its answer")
    assert 0 < len(engine.connector._scheduler._saves.unsaved) <= 20  # type: ignore[attr-defined]
    gate.set()
    engine.finish()
    engine.forget_device()
    again = engine.ask(1, 160, max_tokens=2)
    engine.finish()
    assert engine.spared[again] == 9 * BLOCK
    engine.require_right_answers()


@MODES
def test_a_reset_forgets_what_waits_to_be_saved(start: Start, mode: dict[str, bool]) -> None:
    engine = start(num_host_blocks=16, **mode)
    gate = threading.Event()
    engine.ranks[0].hold_copies_out(gate)
    asked = engine.ask(1, 160, max_tokens=2)
    engine.until(engine.requests[asked].is_finished, "it has its answer")
    side = engine.connector._scheduler  # type: ignore[attr-defined]
    assert side._saves.unsaved
    assert engine.connector.reset_cache() is not False
    gate.set()
    engine.finish()
    assert not any(side._work.cache.directory.holds(key) for key in engine.hashes(asked))
    engine.require_right_answers()


@MODES
def test_with_fewer_blocks_in_host_memory_than_a_prompt_has(start: Start, mode: dict[str, bool]) -> None:
    engine = start(disk=True, num_host_blocks=16, **mode)
    for _ in range(3):
        for number in (1, 2):
            engine.ask(number, 600)
        engine.finish()
        engine.forget_device()
    engine.require_right_answers()
