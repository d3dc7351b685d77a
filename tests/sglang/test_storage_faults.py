"""What becomes of pages when the pool is away or hangs, and of calls that make no sense: never an exception."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from storage_rig import (
    PAGE,
    TOKENS,
    CachePool,
    PoolName,
    count,
    digests,
    host_pool,
    indices,
    page_bytes,
    storage,
    transfer,
)

from cache_pool import until
from kvtier.identity.keys import tenant_id
from kvtier.testing.blocks import summed
from kvtier.tiers.pool.shared_memory.link import MemoryLink
from kvtier.tiers.pool.shared_memory.write import WritePart
from kvtier.tiers.pool.socket_transport import SocketTransport
from kvtier_sglang.page_kinds import part_keys

CALL_S = 10.0
"""What no call of SGLang's may take."""
SOON = {"breaker_open_s": 0.2}
"""Settings of the table `pool`: one that comes back is used again soon."""
QUICK = {"call_timeout_s": 1.0, **SOON}
FLUSH_S = 60.0
"""Bound on what waits for a pool that is there."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


def test_a_pool_that_comes_later_gets_what_was_written_before(tmp_path: Path) -> None:
    keys, mine, theirs = digests(4, start=31), host_pool(seed=31), host_pool()
    pool = CachePool(tmp_path, TOKENS)
    address = f"unix:{tmp_path}/pool.sock"
    with storage(address, mine, client=SOON) as made:
        assert made.batch_exists(keys) == 0
        assert made.batch_get_v1(keys, indices(0, 1, 2, 3)) == [False] * 4
        assert made.batch_set_v1(keys, indices(0, 1, 2, 3)) == [True] * 4
        assert made.batch_set_v1(keys, indices(0, 1, 2, 3)) == [True] * 4, "no second copy of what waits"
        assert count(made, "write", "owed") == 4
        expected = [page_bytes(mine, page) for page in range(4)]
        mine.kv_buffer.zero_()  # SGLang may do with its pages what it likes
        with pool:
            assert made.flush(FLUSH_S)
            until(lambda: count(made, "write", "retried", pool="any") == 4, "all four are counted")
            with storage(pool, theirs) as other:
                assert other.batch_get_v1(keys, indices(0, 1, 2, 3)) == [True] * 4
    assert [page_bytes(theirs, page) for page in range(4)] == expected


def test_a_pool_that_dies_and_comes_back(own_pool: CachePool) -> None:
    keys, mine = digests(6, start=32), host_pool(seed=32)
    with storage(own_pool, mine, client=SOON) as made:
        assert made.batch_set_v1(keys[:2], indices(0, 1)) == [True] * 2
        own_pool.kill()
        with within(CALL_S):
            assert made.batch_exists(keys) == 0
            assert made.batch_get_v1(keys[:2], indices(4, 5)) == [False] * 2
            assert made.batch_set_v1(keys[2:], indices(2, 3, 4, 5)) == [True] * 4
        own_pool.restart()
        assert made.flush(FLUSH_S)
        assert made.batch_exists(keys[2:]) == 4
        assert made.batch_exists(keys) == 0, "the pool has forgotten what it had"


def test_a_pool_that_hangs_costs_each_call_its_deadlines_and_no_more(own_pool: CachePool) -> None:
    keys, mine, theirs = digests(8, start=33), host_pool(seed=33), host_pool()
    side = (PoolName.SWA, host_pool(seed=34))
    deadlines: dict[str, Any] = {"client": {"call_timeout_s": 4.0}, "cache": {"lookup_deadline_s": 0.2}}
    with storage(own_pool, mine, side, **deadlines) as made:
        made.batch_set_v1(keys[:4], indices(0, 1, 2, 3))
        own_pool.suspend()
        try:
            with within(3.5):
                assert made.batch_exists(keys) == 0, "a question has a deadline of its own"
            calls: list[Callable[[], Any]] = [
                lambda: made.batch_get_v1(keys[:4], indices(0, 1, 2, 3)),
                lambda: made.batch_set_v1(keys[4:6], indices(4, 5)),
                lambda: made.batch_set_v2([transfer(PoolName.SWA, keys[:2], 0, 1) for _ in range(6)]),
                lambda: made.batch_get_v2([transfer(PoolName.SWA, keys[:2], 0, 1) for _ in range(6)]),
                lambda: made.batch_exists_v2(keys, [transfer(PoolName.SWA, keys)]),
                lambda: made.get(keys[0]),
                lambda: made.set(keys[0], mine.get_data_page(0)),
                made.clear,
            ]
            for call in calls:
                with within(CALL_S):
                    call()
        finally:
            own_pool.resume()
        assert made.batch_set_v1(keys[6:], indices(6, 7)) == [True] * 2
        assert made.flush(FLUSH_S)
        with storage(own_pool, theirs) as other:
            assert other.batch_get_v1(keys[6:], indices(6, 7)) == [True] * 2
    assert page_bytes(theirs, 6) == page_bytes(mine, 6)


@pytest.mark.parametrize("question_s", [0.2, 1.0], ids=["transfers hang", "questions leave no time"])
def test_calls_one_after_the_other_wait_for_a_pool_that_hangs_once(own_pool: CachePool, question_s: float) -> None:
    """SGLang writes a prompt in many calls, and looks only then whether it should end: it has 10 s."""
    keys, mine = digests(16, start=42), host_pool(seed=42)
    patient = {"call_timeout_s": 1.0, "breaker_failures": 1000}
    with storage(own_pool, mine, client=patient, cache={"lookup_deadline_s": question_s}) as made:
        made.batch_set_v1(keys[:1], indices(0))
        own_pool.suspend()
        try:
            with within(CALL_S):
                for place, key in enumerate(keys[1:], 1):
                    assert made.batch_set_v1([key], indices(place)) == [True], "it waits"
            time.sleep(1.0)
            with within(CALL_S):
                for place, key in enumerate(keys):
                    assert made.batch_get_v1([key], indices(place)) == [False]
        finally:
            own_pool.resume()
        assert made.flush(FLUSH_S)
    with storage(own_pool, mine) as other:
        assert other.batch_exists(keys) == 16


def test_what_another_writer_has_begun_is_not_there_yet(pool: CachePool) -> None:
    keys, mine = digests(2, start=40), host_pool(seed=40)
    socket = SocketTransport(pool.address, TOKENS["red"], tenant_id("red"))
    link = MemoryLink(socket.open_connection)
    try:
        with storage(pool, mine) as made:
            kind = made._pools.anchor.kind
            assert kind is not None
            names = part_keys(kind, made._store._keys.of(keys[:1]))
            items = [summed(name, bytes(kind.part_bytes[0])) for name in names]
            begun = WritePart(link, items, time.monotonic() + 60)
            begun.await_room()
            assert made._store.write_owed(items) == [None] * 2, "it may yet come"
            assert made.batch_set_v1(keys, indices(0, 1)) == [True] * 2
            assert (count(made, "write", "owed"), count(made, "write", "stored")) == (1, 1)
            assert made.batch_exists(keys) == 0
            begun.abandon()
            assert made.flush(FLUSH_S)
            assert made.batch_exists(keys) == 2
            assert made.batch_get_v1(keys, indices(8, 9)) == [True] * 2
    finally:
        link.close()
        socket.close()
    assert page_bytes(mine, 8) == page_bytes(mine, 0)


def test_closing_beside_a_dead_pool_takes_a_deadline(own_pool: CachePool) -> None:
    keys, mine = digests(2, start=35), host_pool(seed=35)
    with storage(own_pool, mine, client=QUICK) as made:
        own_pool.kill()
        made.batch_set_v1(keys, indices(0, 1))
        with within(CALL_S):
            made.close()
        assert made.batch_exists(keys) == 0
        assert made.batch_get_v1(keys, indices(0, 1)) == [False] * 2
        assert made.batch_set_v1(keys, indices(0, 1)) == [False] * 2
        assert made.get(keys[0]) is None
        assert made.batch_exists_v2(keys).kv_hit_pages == 0
        made.clear()
        made.close()


def test_closing_writes_what_waits(own_pool: CachePool) -> None:
    keys, mine = digests(2, start=36), host_pool(seed=36)
    own_pool.kill()
    with storage(own_pool, mine, client=SOON) as made:
        assert made.batch_set_v1(keys, indices(0, 1)) == [True] * 2
        own_pool.restart()
    with storage(own_pool, mine) as other:
        assert other.batch_exists(keys) == 2


def test_what_waits_is_bounded_and_the_first_pages_stay(tmp_path: Path) -> None:
    keys, mine = digests(8, start=37), host_pool(seed=37)
    room = 3 * len(page_bytes(mine, 0))
    with storage(f"unix:{tmp_path}/none.sock", mine, host={"capacity_bytes": room}, client=QUICK) as made:
        assert made.batch_set_v1(keys, indices(*range(8))) == [True] * 3 + [False] * 5
        assert (count(made, "write", "owed"), count(made, "write", "dropped")) == (3, 5)
        made.clear()
        assert made.batch_set_v1(keys[5:], indices(5, 6, 7)) == [True] * 3


@pytest.mark.parametrize(
    ("num_keys", "places"),
    [
        (2, indices(0)),
        (1, indices(0)[:-1]),
        (1, torch.arange(-PAGE, 0)),
        (1, torch.arange(1 << 40, (1 << 40) + PAGE)),
        (1, None),
    ],
    ids=["fewer indices", "part of a page", "before the pool", "behind the pool", "none"],
)
def test_calls_that_make_no_sense_do_nothing(pool: CachePool, num_keys: int, places: Any) -> None:
    keys, mine = digests(num_keys, start=38), host_pool(seed=38)
    with storage(pool, mine) as made:
        assert made.batch_set_v1(keys, places) == [False] * num_keys
        assert made.batch_exists(keys) == 0
        assert made.batch_get_v1(keys, places) == [False] * num_keys
        nowhere = transfer(PoolName.MAMBA, keys)
        nowhere.host_indices = places
        assert made.batch_set_v2([nowhere]) == {PoolName.MAMBA: [False] * num_keys}
        assert made.batch_get_v2([nowhere]) == {PoolName.MAMBA: [False] * num_keys}
        assert made.batch_get(keys, [torch.empty(3), torch.empty(5)]) == [None] * num_keys
        assert not made.batch_set(keys, [None] * num_keys)
        assert made.batch_get_v1([], torch.empty(0, dtype=torch.int64)) == []
        assert made.batch_exists([]) == 0


def test_without_a_host_pool_nothing_is_there(pool: CachePool) -> None:
    with storage(pool) as made:
        assert made.batch_exists(digests(1)) == 0
        assert made.batch_get_v1(digests(1), indices(0)) == [False]
        assert made.batch_set_v1(digests(1), indices(0)) == [False]
        assert not made.exists(digests(1)[0])


def test_a_host_pool_that_fails_is_a_miss(pool: CachePool, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, mine = digests(1, start=39), host_pool(seed=39)
    with storage(pool, mine) as made:
        assert made.batch_set_v1(keys, indices(0)) == [True]

        def fail(_: object) -> None:
            raise RuntimeError("no such page")

        monkeypatch.setattr(mine, "get_page_buffer_meta", fail)
        assert made.batch_get_v1(keys, indices(0)) == [False]
        assert count(made, "read", "refused", pool="any") == 1
        monkeypatch.setattr(mine, "get_page_buffer_meta", lambda _: ([mine.kv_buffer.data_ptr()], [1 << 40]))
        assert made.batch_get_v1(keys, indices(0)) == [False], "another form than at the start"
