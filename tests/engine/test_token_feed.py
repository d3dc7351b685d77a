"""Tokens between threads: each once and in order, however the two sides are timed."""

import asyncio
import random
import threading
import time

from engine_rig import PATIENCE_S
from kvtier_engine.scheduling.completion import Completion, NewToken
from kvtier_engine.scheduling.token_feed import TokenFeed

DONE = Completion(token_ids=(), finish_reason="length", num_prompt_tokens=1, cached_by_tier={}, ttft_s=0.0)


def token(token_id: int) -> NewToken:
    return NewToken(token_id, 0, None)


async def read_all(feed: TokenFeed, pause: bool) -> tuple[list[int], int]:
    tokens: list[int] = []
    num_reads = 0
    while True:
        await feed.wait()
        fresh, done = feed.take()
        tokens += [each.token_id for each in fresh]
        num_reads += 1
        if done:
            return tokens, num_reads
        if pause:
            await asyncio.sleep(random.choice((0, 0, 0.001)))


def write_all(feed: TokenFeed, num_tokens: int, pause: bool) -> None:
    for token_id in range(num_tokens):
        feed.put(token(token_id))
        if pause and random.random() < 0.05:
            time.sleep(0.0005)
    feed.end(DONE)


def test_every_token_arrives_once_and_in_order() -> None:
    async def run(slow_reader: bool, slow_writer: bool) -> tuple[list[int], int]:
        feed = TokenFeed(asyncio.get_running_loop())
        writer = threading.Thread(target=write_all, args=(feed, 5000, slow_writer))
        writer.start()
        try:
            return await asyncio.wait_for(read_all(feed, slow_reader), PATIENCE_S)
        finally:
            writer.join()

    for slow_reader in (False, True):
        for slow_writer in (False, True):
            tokens, _ = asyncio.run(run(slow_reader, slow_writer))
            assert tokens == list(range(5000))


def test_what_waits_comes_at_once_and_an_interruption_ends_the_wait() -> None:
    async def run() -> None:
        feed = TokenFeed(asyncio.get_running_loop())
        threading.Thread(target=write_all, args=(feed, 1000, False)).start()
        await asyncio.wait_for(feed.wait(), PATIENCE_S)
        while not feed.take()[1]:
            await asyncio.wait_for(feed.wait(), PATIENCE_S)
        assert feed.take() == ([], []), "each comes once"
        feed.interrupt()
        await asyncio.wait_for(feed.wait(), PATIENCE_S)

    asyncio.run(run())


def test_an_engine_that_outlives_the_loop_is_not_hurt() -> None:
    async def make() -> TokenFeed:
        return TokenFeed(asyncio.get_running_loop())

    feed = asyncio.run(make())
    feed.put(token(1))
    feed.end(DONE)
    assert feed.take() == ([token(1)], [DONE])
