"""Turns of requests while several tenants ask."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from clock_rig import StillClock
from kvtier.tiers.base import Status, WriteStatus
from kvtier_pool.interpreter_load import InterpreterLoad
from kvtier_pool.service import Addresses, PoolService
from kvtier_pool.turns import FairTurns, Turn
from pool_grpc_rig import connect as connect_grpc
from pool_rig import BLUE, RED, WAIT_S, connect, items, keys, pool_config, running_pool, until


@contextmanager
def closing_service(service: PoolService) -> Iterator[Addresses]:
    addresses = service.start()
    try:
        yield addresses
    finally:
        service.stop()


class Waiting:
    """A request of red's on a thread of its own."""

    def __init__(self, turns: FairTurns) -> None:
        self.turn: Turn | None = None
        self._turns = turns
        self._thread = threading.Thread(target=self._begin, daemon=True)
        self._thread.start()

    def _begin(self) -> None:
        self.turn = self._turns.begin(RED)

    def begun(self) -> Turn:
        self._thread.join(WAIT_S)
        assert self.turn is not None
        return self.turn


def begin(turns: FairTurns, tenant: bytes = RED) -> Turn:
    turn = turns.begin(tenant)  # type: ignore[arg-type]
    assert turn is not None
    return turn


def several(clock: StillClock) -> FairTurns:
    """Turns that two tenants have asked for just now."""
    turns = FairTurns(clock)
    assert turns.begin(BLUE) is None
    turns.end(begin(turns))
    return turns


def test_one_tenant_needs_no_turns_and_two_do_until_one_is_quiet() -> None:
    clock = StillClock()
    turns = FairTurns(clock)
    assert [turns.begin(RED) for _ in range(5)] == [None] * 5
    turns.end(begin(turns, BLUE))
    turns.end(begin(turns))
    clock.now_s += 1.0
    assert [turns.begin(RED) for _ in range(5)] == [None] * 5


def test_a_tenant_waits_for_its_own_requests_alone() -> None:
    turns = several(StillClock())
    first, _ = begin(turns), begin(turns)
    third = Waiting(turns)
    until(lambda: len(turns._of[RED].waiting) == 1)
    turns.end(begin(turns, BLUE))
    turns.end(begin(turns, BLUE))
    assert third.turn is None
    turns.end(first)
    third.begun()


def test_they_begin_in_their_order() -> None:
    turns = several(StillClock())
    running = [begin(turns), begin(turns)]
    waiting = []
    for number in range(1, 5):
        waiting.append(Waiting(turns))
        until(lambda number=number: len(turns._of[RED].waiting) == number)  # type: ignore[misc]
    for one in waiting:
        turns.end(running.pop(0))
        running.append(one.begun())
    for turn in running:
        turns.end(turn)
    assert not turns._of


def test_who_waits_for_a_disk_or_a_client_keeps_no_turn() -> None:
    clock = StillClock()
    turns = several(clock)
    stuck = [begin(turns), begin(turns)]
    third = Waiting(turns)
    until(lambda: len(turns._of[RED].waiting) == 1)
    assert third.turn is None
    clock.now_s += 0.01
    turns.end(third.begun())
    assert not turns._of
    for each in stuck:  # ends after all that began later
        turns.end(each)
    assert not turns._of


def late(clock: StillClock) -> FairTurns:
    """Turns that two tenants have asked for, in a pool whose threads are late."""
    turns = several(clock)
    turns.load.share = 0.25
    return turns


def in_debt(turns: FairTurns, spent_s: float) -> Waiting:
    """A request of red's, which has had so much of the interpreter."""
    turns.charge(RED, spent_s)
    waiting = Waiting(turns)
    until(lambda: len(turns._of[RED].waiting) == 1)
    return waiting


def test_who_has_had_more_than_its_share_waits_while_threads_are_late_and_others_do_not() -> None:
    clock = StillClock()
    turns = late(clock)
    waiting = in_debt(turns, 0.05)
    for _ in range(3):
        turns.end(begin(turns, BLUE))
    assert waiting.turn is None
    clock.now_s += 0.05 / 0.25
    turns.end(waiting.begun())
    assert not turns._of


def test_who_has_paid_and_has_nothing_running_waits_no_longer() -> None:
    clock = StillClock()
    turns = late(clock)
    waiting = in_debt(turns, 0.05)
    red = turns._of[RED]
    most_s = turns._most_s(red, red.waiting[0])
    clock.now_s += 0.05 / 0.25
    turns.end(waiting.begun())
    assert round(most_s, 2) == 0.18, "what it owes, less its credit"


def test_who_waits_for_a_request_that_has_cost_much_looks_again_when_that_is_paid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtier_pool.turns._LATE_TURN_S", 3600.0)
    clock = StillClock()
    turns = late(clock)
    turns.charge(RED, 0.003)
    first = begin(turns)
    second = Waiting(turns)
    until(lambda: len(turns._of[RED].waiting) == 1)
    waiting = turns._of[RED].waiting[0]
    assert waiting.looks_s == clock.now_s + 3600.0, "when the first one counts no longer"
    turns.charge(RED, 0.003)
    turns.end(first)
    until(lambda: waiting.looks_s == turns._paid_s[RED])
    clock.now_s += 0.02
    turns.end(second.begun())
    assert not turns._of


def test_no_tenant_waits_long_for_what_it_has_had_and_none_while_threads_are_in_time() -> None:
    clock = StillClock()
    turns = late(clock)
    waiting = in_debt(turns, 100.0)
    clock.now_s += 0.5
    turns.end(waiting.begun())
    turns.charge(RED, 100.0)
    turns.load.share = 1.0
    turns.end(begin(turns))


def test_a_tenant_near_its_share_has_one_request_handled_at_a_time_while_threads_are_late() -> None:
    turns = late(StillClock())
    turns.charge(RED, 0.003)
    first = begin(turns)
    second = Waiting(turns)
    until(lambda: len(turns._of[RED].waiting) == 1)
    blues = [begin(turns, BLUE), begin(turns, BLUE)]
    assert second.turn is None
    turns.end(first)
    for turn in (second.begun(), *blues):
        turns.end(turn)


def test_of_a_tenant_that_asks_much_one_request_at_a_time_waits_for_its_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes: whoever has many connections waits with them for its own requests, not with others."""
    monkeypatch.setattr("kvtier_pool.one_at_a_time._LONG_WAIT_S", 1000.0)
    clock = StillClock()
    turns = late(clock)
    stuck = turns.one_at_a_time.begin()
    assert stuck is not None
    stuck.until_s += 1000 * WAIT_S
    requests = list[Waiting]()
    for num in range(3):
        turns.charge(RED, 0.003)
        requests.append(Waiting(turns))
        until(lambda num=num: len(turns._of[RED].waiting) == num)  # type: ignore[misc]
        until(lambda: len(turns.one_at_a_time._requests) == 1)
        clock.now_s += 0.02
    turns.one_at_a_time.end(stuck)
    for request in requests:
        turns.end(request.begun())
        clock.now_s += 1.0  # pays for what this thread has computed, which its turn is charged with
    assert not turns._of


def test_a_large_request_lets_others_begin_between_its_parts() -> None:
    turns = several(StillClock())
    large, other = begin(turns), begin(turns)
    parts = turns.parts(keys(range(600)), large)
    assert len(next(parts)) == 256
    second = Waiting(turns)
    until(lambda: len(turns._of[RED].waiting) == 1)
    third = Waiting(turns)
    until(lambda: len(turns._of[RED].waiting) == 2)
    with ThreadPoolExecutor(1) as executor:
        rest = executor.submit(lambda: [len(part) for part in parts])
        turns.end(second.begun())
        turns.end(third.begun())
        assert rest.result(WAIT_S) == [256, 88]
    assert [list(part) for part in turns.parts(keys([1, 2]), None)] == [keys([1, 2])]
    turns.end(large)
    turns.end(other)
    assert not turns._of


def test_the_share_falls_while_threads_are_late_and_comes_back() -> None:
    load = InterpreterLoad()
    shares = []
    for late_s in (0.002, 0.0):
        for _ in range(20 * 40):
            load.note(late_s)
        shares.append(load.share)
    assert shares == [0.15, 1.0]


def test_the_share_grows_fast_until_threads_are_late_for_the_first_time() -> None:
    clock = StillClock()
    load = InterpreterLoad(clock)
    load.watch_until(clock() + WAIT_S)
    shares = []
    for num_late in (0, 0, 20, 0, 0):
        for tick in range(20 + (not shares)):  # the first look begins
            clock.now_s += 0.005 + (0.002 if tick < num_late else 0.0)
            load._look()
        shares.append(round(load.share, 3))
    assert shares == [0.3, 0.6, 0.42, 0.45, 0.48]
    clock.now_s += WAIT_S
    assert not load._look()
    assert load.share == 1.0, "one tenant alone"
    load.watch_until(clock() + WAIT_S)
    load._look()
    assert round(load.share, 3) == 0.48, "as it was: who comes and goes does not slow others each time"


def test_a_pool_watches_how_late_its_threads_are_while_several_tenants_ask() -> None:
    load = InterpreterLoad()
    load.start()
    try:
        load.watch_until(load._clock() + WAIT_S)
        until(lambda: load._num_ticks > 3)
        load.watch_until(0.0)
        until(lambda: not load._looked_s)
        assert load.share == 1.0
    finally:
        load.stop()


def test_every_request_of_many_connections_is_answered_beside_another_tenants() -> None:
    with running_pool() as pool:
        tiers = [connect(pool.block[0], tenant) for tenant in ["red"] * 8 + ["blue"]]
        wrong: list[object] = []

        def ask(place: int) -> None:
            of = BLUE if place == 8 else RED
            tiers[place].write(items([place], of))
            for _ in range(40):
                if (found := tiers[place].lookup(keys([place], of))) != [Status.HIT]:
                    wrong.append(found)
            found = tiers[place].lookup(keys(range(600), of))  # in parts
            if found[place] != Status.HIT or found[9:] != [Status.MISS] * 591:
                wrong.append(found)

        threads = [threading.Thread(target=ask, args=(place,)) for place in range(9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        for tier in tiers:
            tier.close()
        assert not wrong
        assert not any(thread.is_alive() for thread in threads)


def test_calls_of_grpc_take_turns_with_requests_of_connections() -> None:
    """Red has both of its turns; a call of red's waits for one of them, and blue's is answered meanwhile."""
    service = PoolService(pool_config())
    with closing_service(service) as addresses, ThreadPoolExecutor(1) as executor:
        turns = service._servicer._turns
        assert turns is service._block._turns
        over_grpc = [connect_grpc(addresses.grpc[0], tenant) for tenant in ("red", "blue")]
        for tier, tenant in zip(over_grpc, (RED, BLUE), strict=True):
            assert tier.lookup(keys([0], tenant)) == [Status.MISS]
        clock = StillClock()
        turns._clock = clock
        turns._several_until_s = clock.now_s + 1.0
        held = [begin(turns), begin(turns)]
        waiting = executor.submit(over_grpc[0].write, items([0]))
        until(lambda: len(turns._of[RED].waiting) == 1)
        assert over_grpc[1].lookup(keys([0], BLUE)) == [Status.MISS]
        assert not waiting.done()
        turns.end(held[0])
        assert waiting.result(WAIT_S) == [WriteStatus.STORED]
        turns.end(held[1])
        for tier in over_grpc:
            tier.close()
