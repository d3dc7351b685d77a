"""Work that can wait is done one piece at a time while the threads of a pool are late."""

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from clock_rig import StillClock
from kvtier.identity.keys import StoreKey
from kvtier.testing.blocks import make_key, summed
from kvtier.tiers.base import WriteStatus
from kvtier.tiers.disk.tier import DiskTier
from kvtier_pool.interpreter_load import InterpreterLoad
from kvtier_pool.one_at_a_time import OneAtATime, Piece
from kvtier_pool.service import PoolService
from pool_rig import RED, WAIT_S, connect, items, pool_config, until

NBYTES = 256 << 10


class Waiting:
    """A piece of work on a thread of its own."""

    def __init__(self, pieces: OneAtATime) -> None:
        self.piece: Piece | None = None
        self._pieces = pieces
        num_waiting = len(pieces._requests)
        self._thread = threading.Thread(target=self._begin, daemon=True)
        self._thread.start()
        until(lambda: len(pieces._requests) == num_waiting + 1)

    def _begin(self) -> None:
        self.piece = self._pieces.begin()

    def begun(self) -> Piece:
        self._thread.join(WAIT_S)
        assert self.piece is not None
        return self.piece


class Writing:
    """A batch that a thread of its own writes down; `sizes` are the blocks of its parts."""

    def __init__(self, pieces: OneAtATime, num_blocks: int, nbytes: int = NBYTES) -> None:
        self.sizes: list[int] = []
        self._parts = pieces.parts(blocks(num_blocks, nbytes))
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def _write(self) -> None:
        self.sizes.extend(len(part) for part in self._parts)

    def written(self) -> list[int]:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        return self.sizes


def blocks(num: int, nbytes: int = NBYTES) -> list[tuple[StoreKey, bytes, int]]:
    return [summed(make_key(f"block {i}"), bytes(nbytes)) for i in range(num)]


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
    assert not pieces._requests
    assert not pieces._writes


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
    assert Writing(pieces, 5).written() == [5]


def test_a_piece_that_waits_for_a_disk_keeps_the_next_one_for_a_moment_only(
    pieces: OneAtATime, clock: StillClock
) -> None:
    stuck, waiting, last = pieces.begin(), Waiting(pieces), Waiting(pieces)
    clock.now_s += 0.003
    begun = waiting.begun()
    pieces.end(stuck)
    assert last.piece is None, "which the one that is stuck does not end"
    pieces.end(begun)
    pieces.end(last.begun())


def test_blocks_are_written_a_part_at_a_time_and_others_begin_in_between(pieces: OneAtATime) -> None:
    parts = pieces.parts(blocks(5))
    assert len(next(parts)) == 2
    waiting, sizes = Waiting(pieces), list[int]()
    rest = threading.Thread(target=lambda: sizes.extend(len(part) for part in parts), daemon=True)
    rest.start()
    pieces.end(waiting.begun())
    rest.join(WAIT_S)
    assert sizes == [2, 1]


@pytest.mark.parametrize(("nbytes", "sizes"), [(4 << 10, [16]), (200 << 10, [3] * 5 + [1]), (2 << 20, [1] * 16)])
def test_a_part_has_as_many_blocks_as_are_large_together(pieces: OneAtATime, nbytes: int, sizes: list[int]) -> None:
    """Each part costs a call of a tier, however small its blocks are."""
    assert Writing(pieces, 16, nbytes).written() == sizes


def test_whoever_asks_much_does_not_keep_blocks_from_a_disk(pieces: OneAtATime, clock: StillClock) -> None:
    """One piece of what is written down begins for each request, however many requests wait."""
    running = pieces.begin()
    requests = [Waiting(pieces) for _ in range(4)]
    writing = [Writing(pieces, 1) for _ in range(2)]
    until(lambda: len(pieces._writes) == 2)
    pieces.end(running)
    for each in writing:
        pieces.end(requests.pop(0).begun())
        assert each.written() == [1]
    for request in requests:
        pieces.end(request.begun())


def test_no_number_of_pieces_that_are_stuck_keeps_another_one_for_long(pieces: OneAtATime, clock: StillClock) -> None:
    stuck = [pieces.begin(), *(Waiting(pieces) for _ in range(20))]
    writing = Writing(pieces, 5)
    until(lambda: pieces._writes)
    clock.now_s += 0.01
    assert writing.written() == [5]
    for each in stuck:
        pieces.end(each.begun() if isinstance(each, Waiting) else each)


def test_blocks_that_have_waited_for_long_are_written_at_once(pieces: OneAtATime, clock: StillClock) -> None:
    """A tenant that lets each of its pieces count for as long as any may does not slow down what is written."""
    stuck = pieces.begin()
    writing = Writing(pieces, 5)
    until(lambda: pieces._writes)
    clock.now_s += 0.01
    assert writing.written() == [5]
    pieces.end(stuck)


def test_who_gives_up_in_the_middle_of_a_batch_keeps_nobody_waiting(pieces: OneAtATime) -> None:
    parts = pieces.parts(blocks(5))
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
            until(lambda: pieces._writes)
            assert not sizes, "the writers wait"
            turns.charge(RED, 0.05)
            asked = threading.Thread(target=tier.write, args=(items([7]),), daemon=True)
            asked.start()
            until(lambda: pieces._requests)
            pieces.end(running)
            asked.join(WAIT_S)
        assert not asked.is_alive()
    finally:
        service.stop()
    assert sum(sizes) == 7
