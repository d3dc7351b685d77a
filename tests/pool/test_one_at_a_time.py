"""Work that can wait is done one piece at a time while the threads of a pool are late."""

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from clock_rig import StillClock
from kvtier.tiers.base import WriteStatus
from kvtier.tiers.disk.tier import DiskTier
from kvtier_pool.interpreter_load import InterpreterLoad
from kvtier_pool.one_at_a_time import OneAtATime, Piece
from kvtier_pool.service import PoolService
from pool_rig import RED, WAIT_S, connect, items, pool_config, until


class Waiting:
    """A piece of work on a thread of its own."""

    def __init__(self, pieces: OneAtATime) -> None:
        self.piece: Piece | None = None
        self._pieces = pieces
        num_waiting = len(pieces._waiting)
        self._thread = threading.Thread(target=self._begin, daemon=True)
        self._thread.start()
        until(lambda: len(pieces._waiting) == num_waiting + 1)

    def _begin(self) -> None:
        self.piece = self._pieces.begin()

    def begun(self) -> Piece:
        self._thread.join(WAIT_S)
        assert self.piece is not None
        return self.piece


@pytest.fixture
def clock() -> StillClock:
    return StillClock()


@pytest.fixture
def pieces(clock: StillClock) -> Iterator[OneAtATime]:
    """In a pool whose threads are late."""
    load = InterpreterLoad(clock)
    load.share = 0.5
    pieces = OneAtATime(load, clock)
    yield pieces
    assert pieces._running is None
    assert not pieces._waiting


def test_pieces_begin_one_after_the_other_in_their_order(pieces: OneAtATime) -> None:
    running = pieces.begin()
    waiting = [Waiting(pieces) for _ in range(3)]
    for each in waiting:
        assert all(later.piece is None for later in waiting[waiting.index(each) :])
        pieces.end(running)
        running = each.begun()
    pieces.end(running)


def test_nothing_waits_while_threads_are_in_time(pieces: OneAtATime) -> None:
    pieces._load.share = 1.0
    assert [pieces.begin(), pieces.begin()] == [None, None]
    pieces.end(None)
    assert [list(part) for part in pieces.blocks(range(5))] == [[0, 1, 2, 3, 4]]


def test_a_piece_that_waits_for_a_disk_keeps_the_next_one_for_a_moment_only(
    pieces: OneAtATime, clock: StillClock
) -> None:
    stuck, waiting, last = pieces.begin(), Waiting(pieces), Waiting(pieces)
    clock.now_s += 0.01
    begun = waiting.begun()
    pieces.end(stuck)
    assert last.piece is None, "which the one that is stuck does not end"
    pieces.end(begun)
    pieces.end(last.begun())


def test_blocks_are_written_two_at_a_time_and_others_begin_in_between(pieces: OneAtATime) -> None:
    parts = pieces.blocks(range(5))
    assert list(next(parts)) == [0, 1]
    waiting = Waiting(pieces)
    sizes = list[int]()
    rest = threading.Thread(target=lambda: sizes.extend(len(part) for part in parts), daemon=True)
    rest.start()
    pieces.end(waiting.begun())
    rest.join(WAIT_S)
    assert sizes == [2, 1]


def test_blocks_that_have_waited_for_long_are_written_at_once(pieces: OneAtATime, clock: StillClock) -> None:
    """Whose clients keep each of its pieces for as long as they count does not slow down what is written."""
    stuck = pieces.begin()
    parts = pieces.blocks(range(5))
    sizes = list[int]()
    writer = threading.Thread(target=lambda: sizes.extend(len(part) for part in parts), daemon=True)
    writer.start()
    until(lambda: pieces._waiting)
    clock.now_s += 0.01
    writer.join(WAIT_S)
    assert sizes == [5]
    pieces.end(stuck)


def test_who_gives_up_in_the_middle_of_a_batch_keeps_nobody_waiting(pieces: OneAtATime) -> None:
    parts = pieces.blocks(range(5))
    next(parts)
    parts.close()
    pieces.end(pieces.begin())


def test_a_pool_writes_down_and_serves_who_asks_for_much_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, write = list[int](), DiskTier.write

    def count(*args: object) -> list[WriteStatus]:
        sizes.append(len(args[1]))  # type: ignore[arg-type]
        return write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(DiskTier, "write", count)
    monkeypatch.setattr(InterpreterLoad, "watch_until", lambda *_: None)  # threads are as late as the test says
    service = PoolService(pool_config(disk_dir=tmp_path))
    addresses = service.start()
    try:
        turns, pieces = service._turns, service._turns.one_at_a_time
        turns._several_until_s = turns._clock() + WAIT_S
        turns.load.share = 0.5
        running = pieces.begin()
        assert running is not None
        running.until_s += WAIT_S
        with closing(connect(addresses.block[0], "red")) as tier:
            assert tier.write(items(range(6))) == [WriteStatus.STORED] * 6
            until(lambda: pieces._waiting)
            assert not sizes, "the writers wait"
            turns.charge(RED, 0.003)
            asked = threading.Thread(target=tier.write, args=(items([7]),), daemon=True)
            num_waiting = len(pieces._waiting)
            asked.start()
            until(lambda: len(pieces._waiting) == num_waiting + 1)
            pieces.end(running)
            asked.join(WAIT_S)
        assert not asked.is_alive()
    finally:
        service.stop()
    assert sum(sizes) == 7
