"""A pool that dies or hangs: requests are answered as if there were none, and soon."""

import time

from engine_lab import Lab
from vllm_rig import Answer, all_hit, cached_of, make_prompts, none_hit, num_blocks, settings, tokens_of, transfer

from cache_pool import CachePool, until

PROMPTS = make_prompts()
HASTE = {"call_timeout_s": 1.0, "breaker_open_s": 0.5}
HASTY_CACHE = {"lookup_deadline_s": 0.5, "load_deadline_s": 2.0}
HANGS_AFTER_S = (0, 0.002, 0.005, 0.01, 0.02, 0.04)


def test_a_pool_that_is_killed_between_runs(lab: Lab, expected: list[Answer], pool: CachePool) -> None:
    with lab.engine(transfer(settings(pool={"address": [pool.address]}))) as engine:
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
    """From before the requests come to the middle of their loads, or after. It is used again as soon as it is back."""
    with lab.engine(transfer(settings(pool={"address": [pool.address], **HASTE}, cache=HASTY_CACHE))) as engine:

        def hits() -> bool:
            engine.reset(connector=True)
            answers = engine.generate(PROMPTS)
            assert tokens_of(answers) == tokens_of(expected)
            return cached_of(answers) == all_hit(PROMPTS)

        until(hits, "the pool has all blocks")
        for after_s in HANGS_AFTER_S:
            engine.reset(connector=True)
            if after_s == 0:
                pool.suspend()
            engine.begin_generate(PROMPTS)
            time.sleep(after_s)  # not until something: any moment must do
            pool.suspend()
            answers = engine.end_generate()
            assert tokens_of(answers) == tokens_of(expected)
            if after_s == 0:
                assert cached_of(answers) == none_hit(PROMPTS)
            pool.resume()
            until(hits, "the pool is used again")
