"""A thread that looks after something every now and then."""

import threading

from kvtier.system.ticking_thread import TickingThread

_WAIT_S = 30.0


def test_it_looks_again_and_again_until_there_is_nothing_left_and_again_when_it_is_woken() -> None:
    looks = threading.Semaphore(0)
    more = iter([True, True, False, False])

    def look() -> bool:
        looks.release()
        return next(more)

    ticking = TickingThread("test", 0.001, look)
    ticking.start()
    assert not looks.acquire(blocking=False)
    for num_looks in (3, 1):
        ticking.wake()
        for _ in range(num_looks):
            assert looks.acquire(timeout=_WAIT_S)
    assert not looks.acquire(blocking=False)
    ticking.stop()
    assert not ticking.alive


def test_a_stop_during_the_last_look_is_heard() -> None:
    def look() -> bool:
        stopping.start()
        assert ticking._awake.wait(_WAIT_S)  # the stop has come, and waits for the end of this look
        return False

    ticking = TickingThread("test", 0.001, look)
    stopping = threading.Thread(target=ticking.stop, daemon=True)
    ticking.start()
    ticking.wake()
    ticking._thread.join(_WAIT_S)
    assert not ticking.alive


def test_wakes_before_the_start_count_and_stops_without_a_start_do_nothing() -> None:
    looked = threading.Event()

    def look() -> bool:
        looked.set()
        return False

    ticking = TickingThread("test", 0.001, look)
    ticking.wake()
    ticking.start()
    assert looked.wait(_WAIT_S)
    ticking.stop()
    ticking.stop()
    TickingThread("test", 0.001, lambda: False).stop()
