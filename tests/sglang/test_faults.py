"""Whatever fails is a miss: no exception, no wait of 10 s, no wrong byte. And what comes back is used again."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from engine_shape import PATIENT_POOL, Shape, Storage, kvtier, pages
from hicache_rig import Engine, engine
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE

from cache_pool import TOKENS, CachePool, until
from garbling_proxy import GarblingProxy

HASTE = {"call_timeout_s": 1.0, "breaker_open_s": 0.5}
NUM_PAGES = 32
MOMENTS_S = (None, 0.0, 0.001, 0.002, 0.004, 0.008, 0.016)
"""At which a pool fails after an operation has begun; None: before."""
SHAPE = Shape(64, num_pages=NUM_PAGES * (len(MOMENTS_S) + 1))


@dataclass(frozen=True, slots=True)
class Fault:
    begin: Callable[[CachePool], None]
    end: Callable[[CachePool], object]


FAULTS = {"killed": Fault(CachePool.kill, CachePool.__enter__), "stopped": Fault(CachePool.suspend, CachePool.resume)}
each_fault = pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)


@pytest.fixture(autouse=True)
def _no_exception_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """SGLang's threads log what they catch."""
    yield
    records = [record for when in ("setup", "call") for record in caplog.get_records(when)]
    raised = [record.getMessage() for record in records if record.levelno >= logging.ERROR or record.exc_info]
    assert not raised


def hasty(pool: CachePool) -> Storage:
    return kvtier(pool, pool={"address": [pool.address], **HASTE}, cache={"lookup_deadline_s": 0.5})


def at(moment_s: float | None, begin: Callable[[], object], fault: Callable[[], object]) -> None:
    """Begins something, and has the fault in the middle of it."""
    if moment_s is None:
        fault()
        begin()
    else:
        begin()
        time.sleep(moment_s)  # not until something: any moment must do
        fault()


def await_stored(running: Engine, tokens: list[int]) -> None:
    until(lambda: running.num_stored(tokens) == len(tokens), "all pages are in the pool")


@each_fault
def test_a_pool_that_fails_while_pages_are_written(fault: Fault, own_pool: CachePool) -> None:
    """What it did not take is offered again when it is back."""
    with engine(SHAPE, hasty(own_pool)) as producer:
        for number, moment_s in enumerate(MOMENTS_S):
            tokens = pages(SHAPE, 100 * number, NUM_PAGES)
            producer.compute(tokens, seed=number)
            at(moment_s, partial(producer.begin_store, tokens), partial(fault.begin, own_pool))
            producer.end_store()
            producer.require_alive()
            fault.end(own_pool)
            after = pages(SHAPE, 100 * number + 50, 1)
            producer.compute(after, seed=number)
            producer.store(after)
            await_stored(producer, after)
            if moment_s is None or fault is FAULTS["stopped"]:
                await_stored(producer, tokens)
    with engine(SHAPE, hasty(own_pool)) as consumer:
        for number in range(len(MOMENTS_S)):
            consumer.fetch(pages(SHAPE, 100 * number, NUM_PAGES), seed=number)


@each_fault
def test_a_pool_that_fails_while_pages_are_read(fault: Fault, own_pool: CachePool) -> None:
    storage = hasty(own_pool)
    with engine(SHAPE, storage) as producer, engine(SHAPE, storage) as consumer:
        for number, moment_s in enumerate(MOMENTS_S):
            tokens = pages(SHAPE, 100 * number, NUM_PAGES)
            producer.compute(tokens, seed=number)
            producer.store(tokens)
            await_stored(producer, tokens)
            await_stored(consumer, tokens)
            at(moment_s, partial(consumer.begin_prefetch, tokens), partial(fault.begin, own_pool))
            num_hit = consumer.end_prefetch(tokens)
            assert num_hit == 0 or moment_s is not None
            consumer.require_loaded(tokens[:num_hit], seed=number)
            consumer.require_alive()
            fault.end(own_pool)


@each_fault
def test_deadlines_that_nobody_has_set(fault: Fault, own_pool: CachePool) -> None:
    """10 s are enough for each step also with the configuration's defaults, and for an engine's end."""
    with engine(SHAPE, kvtier(own_pool, pool={"address": [own_pool.address]}, cache={})) as running:
        tokens = pages(SHAPE, 1, NUM_PAGES)
        running.compute(tokens)
        fault.begin(own_pool)
        running.store(tokens)
        assert running.prefetch(pages(SHAPE, 100, NUM_PAGES)) == 0
        running.require_alive()
    fault.end(own_pool)


def test_a_flush_in_the_middle_of_a_long_prompt_while_the_pool_hangs(own_pool: CachePool) -> None:
    """`/flush_cache` fails, and SGLang with it, unless its threads end within 10 s: also with the deadlines that nobody
    has set, and whatever the breaker does."""
    shape = Shape(1, num_pages=4 * STORAGE_BATCH_SIZE)
    stubborn = {"address": [own_pool.address], "breaker_failures": 100}
    with engine(shape, kvtier(own_pool, pool=stubborn, cache={})) as running:
        tokens, after = pages(shape, 1, 4 * STORAGE_BATCH_SIZE), pages(shape, 2, 1)
        running.compute(tokens)
        own_pool.suspend()
        running.begin_store(tokens)
        time.sleep(0.1)  # SGLang's thread is in the first of its calls: a hanging pool holds it for seconds
        running.cache.reset()
        running.require_alive()
        own_pool.resume()
        running.allocator.clear()
        running.compute(after)
        running.store(after)
        await_stored(running, after)


def test_a_pool_that_is_not_there_yet(tmp_path: Path) -> None:
    pool = CachePool(tmp_path, TOKENS)
    with engine(SHAPE, hasty(pool)) as running:
        tokens = pages(SHAPE, 1, NUM_PAGES)
        running.compute(tokens)
        running.store(tokens)
        assert running.prefetch(pages(SHAPE, 100, 2)) == 0
        with pool:
            await_stored(running, tokens)
            with engine(SHAPE, kvtier(pool)) as consumer:
                assert consumer.fetch(tokens) == len(tokens)


def test_a_flipped_bit_on_the_way(own_pool: CachePool) -> None:
    tokens = pages(SHAPE, 1, NUM_PAGES)
    with engine(SHAPE, kvtier(own_pool)) as producer:
        producer.compute(tokens)
        producer.store(tokens)
    proxy = GarblingProxy(own_pool.tcp)
    with (
        proxy.running() as address,
        engine(SHAPE, kvtier(own_pool, pool={"address": [address], **PATIENT_POOL})) as consumer,
    ):
        assert consumer.num_stored(tokens) == len(tokens)
        proxy.garbles.set()
        assert consumer.fetch(tokens) < len(tokens)
        assert proxy.num_garbled == 1
        assert consumer.fetch(tokens) == len(tokens)


@pytest.mark.parametrize("copying", [False, True], ids=["in place", "copying"])
@pytest.mark.parametrize("kind", ["full", "swa", "mamba"])
def test_faults_that_sglang_injects(kind: str, copying: bool, pool: CachePool) -> None:
    """Half of all calls fail, and all are late, by its own test injector."""
    num_rounds, num_pages = 12, 6
    shape, storage = Shape(kind=kind, num_pages=num_pages * 13), kvtier(pool, copying=copying)
    prompts = [pages(shape, number, num_pages) for number in range(num_rounds)]
    with (
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(0.5),
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY.override(0.02),
        engine(shape, storage) as producer,
        engine(shape, storage) as consumer,
    ):
        for seed, tokens in enumerate(prompts):
            producer.compute(tokens, seed=seed)
            producer.store(tokens)
            consumer.fetch(tokens, seed=seed)
            for running in (producer, consumer):
                running.require_alive()
    with engine(shape, storage) as consumer:
        num_hits = [consumer.fetch(tokens, seed=seed) for seed, tokens in enumerate(prompts)]
    assert kind != "full" or any(num_hits), "of a dozen, all failed"
