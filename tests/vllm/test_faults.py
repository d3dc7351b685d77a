"""A pool that dies or hangs: requests are answered as if there were none, and soon."""

from vllm_rig import (
    Answer,
    CachePool,
    Lab,
    all_hit,
    cached_of,
    make_prompts,
    none_hit,
    num_blocks,
    settings,
    tokens_of,
    transfer,
    until,
)

PROMPTS = make_prompts()
PATIENCE = {"call_timeout_s": 1.0, "breaker_open_s": 0.5}


def _sharing(pool: CachePool) -> dict[str, object]:
    deadlines = {"lookup_deadline_s": 0.5, "load_deadline_s": 2.0}
    return transfer(settings(pool={"address": [pool.address], **PATIENCE}, cache=deadlines))


def test_a_pool_that_is_killed_between_runs(lab: Lab, expected: list[Answer], pool: CachePool) -> None:
    with lab.engine(_sharing(pool)) as engine:
        engine.generate(PROMPTS)
        pool.await_written(num_blocks(PROMPTS))
        pool.kill()
        engine.reset(connector=True)
        answers = engine.generate(PROMPTS)
        assert tokens_of(answers) == tokens_of(expected)
        assert cached_of(answers) == none_hit(PROMPTS)
        engine.reset()
        again = engine.generate(PROMPTS)
    assert tokens_of(again) == tokens_of(expected)
    assert cached_of(again) == all_hit(PROMPTS), "host memory works without the pool"


def test_a_pool_that_hangs_during_a_run(lab: Lab, expected: list[Answer], pool: CachePool) -> None:
    """First in the middle of loads, then before a request comes, and it is used again when it is back."""
    with lab.engine(_sharing(pool)) as engine:
        engine.generate(PROMPTS)
        pool.await_written(num_blocks(PROMPTS))
        engine.reset(connector=True)
        engine.begin_generate(PROMPTS)
        until(lambda: pool.num_read() > 0, "a load has begun")
        pool.suspend()
        assert tokens_of(engine.end_generate()) == tokens_of(expected)

        engine.reset(connector=True)
        answers = engine.generate(PROMPTS)
        assert tokens_of(answers) == tokens_of(expected)
        assert cached_of(answers) == none_hit(PROMPTS)
        pool.resume()

        def hits() -> bool:
            engine.reset(connector=True)
            answers = engine.generate(PROMPTS)
            assert tokens_of(answers) == tokens_of(expected)
            return cached_of(answers) == all_hit(PROMPTS)

        until(hits, "the pool is used again")
