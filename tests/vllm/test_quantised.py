"""KV in fp8: what keys and values were divided by decides its bytes as much as the weights do."""

import pytest
import tiny_llama
import torch
from engine_lab import Lab
from vllm_rig import Answer, all_hit, cached_of, make_prompts, none_hit, settings, tokens_of, transfer

from cache_pool import CachePool

PROMPTS = make_prompts()


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM has fp8 on CPUs with AVX-512 alone")
def test_tokens_are_equal_and_engines_without_fp8_are_not_met(
    lab: Lab, expected: list[Answer], pool: CachePool
) -> None:
    """The checkpoint has scales, and vLLM takes it at its word that KV is fp8."""
    model = lab.home / "calibrated"
    tiny_llama.make(model, seed=0, kv_scale=0.02)
    connector = transfer(settings(pool={"address": pool.address}))
    with lab.engine(model=model) as engine:
        computed = engine.generate(PROMPTS)
        assert tokens_of(computed) != tokens_of(expected), "fp8 plays no part"
        engine.restart(connector)
        cold = engine.generate(PROMPTS)
        assert tokens_of(cold) == tokens_of(computed)
        assert cached_of(cold) == none_hit(PROMPTS)
        engine.restart(connector)
        warm = engine.generate(PROMPTS)
        assert tokens_of(warm) == tokens_of(computed)
        assert cached_of(warm) == all_hit(PROMPTS)
        engine.restart(connector, kv_cache_dtype="bfloat16")
        others = engine.generate(PROMPTS)
        assert tokens_of(others) == tokens_of(expected)
        assert cached_of(others) == none_hit(PROMPTS)
