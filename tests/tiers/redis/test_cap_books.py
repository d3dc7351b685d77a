"""The books of caps in a Redis: what pools write into them, and what is counted afterwards."""

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from kvtier.clock import MONOTONIC
from kvtier.identity.keys import tenant_id
from kvtier.testing.blocks import make_payload, read_blocks
from kvtier.tiers.redis import cap_script, caps
from kvtier.tiers.redis.cap_script import NUM_BOOKS, UNIT_BYTES, book_name
from kvtier.tiers.redis.caps import TenantCaps
from kvtier.tiers.redis.exchange import Conversation
from kvtier.tiers.redis.writer import BlockWriter
from redis_caps_rig import (
    BLOCK_BYTES,
    BLUE,
    CAP_BYTES,
    EXISTS,
    FAILED,
    FULL,
    MOST_BLOCKS,
    RED,
    STORED,
    Clock,
    capped,
    check_books,
    forbidden,
    items,
    keys,
    stored_bytes,
    there,
    turned_clock,
    write_all,
)
from redis_rig import (
    MIB,
    WAIT_S,
    RedisServer,
    connect,
    emptied,
    module_redis,
    somebody_else,
)

running = pytest.fixture(scope="module")(module_redis)


@pytest.fixture
def server(running: RedisServer) -> Iterator[RedisServer]:
    yield from emptied(running)


client = pytest.fixture(somebody_else)
clock = pytest.fixture(turned_clock)


def test_two_pools_that_write_at_once_stay_below_it_together(server: RedisServer, client: redis.Redis) -> None:
    tiers = [capped(server) for _ in range(3)]
    with ThreadPoolExecutor(6) as executor:
        jobs = [executor.submit(write_all, tier, range(n * 1000, n * 1000 + 400)) for n, tier in enumerate(tiers * 2)]
        for job in jobs:
            assert set(job.result()) <= {STORED, FULL}, "what is young may still be on its way, and is not evicted"
    assert stored_bytes(client) <= check_books(client) * UNIT_BYTES <= CAP_BYTES
    for tier in tiers:
        tier.close()


def test_what_a_pool_without_the_cap_writes_counts_when_it_is_offered_again(
    server: RedisServer, client: redis.Redis
) -> None:
    old, tier = connect(server.url), capped(server)
    old.write(items(range(8)))
    assert check_books(client) == 0
    assert tier.write(items(range(8))) == [EXISTS] * 8
    assert check_books(client) == 8 * 4
    assert read_blocks(old, keys(range(8)), BLOCK_BYTES) == [make_payload(label, BLOCK_BYTES) for label in range(8)]
    old.close()
    tier.close()


def test_what_a_pool_did_not_live_to_remove_the_next_one_does(
    server: RedisServer, client: redis.Redis, clock: Clock
) -> None:
    tier = capped(server)
    write_all(tier, range(MOST_BLOCKS))
    dying = TenantCaps(tier._servers, MIB, lambda small, others, deadline: None, lambda refusal: None)
    dying.set({RED: CAP_BYTES})
    dying.make_room(keys(range(1000, 1200)), [BLOCK_BYTES] * 200, MONOTONIC() + WAIT_S)
    assert sum(there(tier, range(MOST_BLOCKS))) > MOST_BLOCKS // 2, "condemned, and not removed"
    tier.write(items(range(2000, 2200)))
    assert sum(there(tier, range(MOST_BLOCKS))) > 0
    clock.advance(2 * cap_script.GRACE_S)
    for _ in range(4):
        tier.write(items(range(2000, 2200)))
    assert stored_bytes(client) <= CAP_BYTES
    check_books(client)
    tier.close()


@pytest.mark.parametrize("books_answer", [True, False])
def test_what_was_written_though_the_answer_was_lost_goes_with_its_count_or_stays_with_it(
    server: RedisServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, books_answer: bool
) -> None:
    tier, really = capped(server), BlockWriter._set_firsts
    write_all(tier, range(8))

    with contextlib.ExitStack() as lost:

        def cut_off(
            writer: BlockWriter, talk: Conversation, places: Sequence[int], blocks: dict[int, Any]
        ) -> list[int]:
            really(writer, talk, places, blocks)
            for place in places:
                writer.statuses[place] = FAILED
            if not books_answer:
                lost.enter_context(forbidden(client, "evalsha"))
            raise redis.ConnectionError("cut off")

        lost.enter_context(monkeypatch.context()).setattr(BlockWriter, "_set_firsts", cut_off)
        assert tier.write(items(range(100, 116))) == [FAILED] * 16
    assert check_books(client) == (8 if books_answer else 24) * 4
    assert there(tier, range(100, 116)) == [not books_answer] * 16
    tier.close()


def test_large_batches_leave_books_as_small_as_small_ones(
    server: RedisServer, client: redis.Redis, clock: Clock
) -> None:
    tier = capped(server)
    for start in range(0, 8000, 1000):
        tier.write(items(range(start, start + 1000), nbytes=100))
        clock.advance(2 * cap_script.GRACE_S)
    num_marks = sum(client.zcount(book_name(RED, book), "(0", "(1") for book in range(NUM_BOOKS))
    assert num_marks <= 1000, "of blocks that the last call removed"
    tier.close()


def test_no_call_keeps_the_server_from_others_for_long(server: RedisServer, client: redis.Redis) -> None:
    """A script has some hundreds of blocks at a time, of however many."""
    tier, count = capped(server), 10_000
    client.config_resetstat()
    tier.discard(keys(range(count)))
    assert client.info("commandstats")["cmdstat_evalsha"]["calls"] >= count / 512
    tier.close()


def test_reads_are_noted_no_longer_than_books_learn_of_them(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(caps, "MONOTONIC", lambda: now[0])
    tenants = [tenant_id(f"reader-{i}") for i in range(50)]
    tier = connect(server.url)
    tier.set_caps(dict.fromkeys([RED, *tenants], CAP_BYTES))
    for tenant in tenants:
        tier._caps.note_reads(keys(range(20), tenant))
    now[0] += cap_script.GRACE_S
    tier._caps.note_reads(keys(range(20), BLUE))
    tier._caps.note_reads(keys(range(2)))
    assert sum(map(len, tier._caps._noted.values())) == 2
    tier.set_caps({})
    tier._caps.note_reads(keys(range(20)))
    assert not tier._caps._noted
    tier.close()


def test_a_tenant_whose_cap_goes_and_comes_back_is_within_it_again(
    server: RedisServer, client: redis.Redis, clock: Clock
) -> None:
    """What it wrote without a cap counts when it is offered again, or else is evicted by the server."""
    tier = capped(server)
    write_all(tier, range(MOST_BLOCKS // 2))
    tier.set_caps({})
    tier.discard(keys(range(MOST_BLOCKS // 4)))
    write_all(tier, range(1000, 1000 + 2 * MOST_BLOCKS))
    tier.set_caps({RED: CAP_BYTES})
    assert write_all(tier, range(1000, 1000 + 2 * MOST_BLOCKS))[FULL] == 0
    assert stored_bytes(client) <= check_books(client) * UNIT_BYTES <= CAP_BYTES
    tier.close()
