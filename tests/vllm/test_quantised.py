"""KV in fp8: what keys and values were divided by decides its bytes as much as the weights do."""

import pytest
import tiny_llama
import torch
from engine_lab import Lab
from vllm_rig import all_hit, cached_of, make_prompts, none_hit, settings, tokens_of, transfer

from cache_pool import CachePool

PROMPTS = make_prompts()
ROUNDED = {"dtype": "bfloat16"}
"""What KV that is not fp8 can be told to be."""


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM has fp8 on CPUs with AVX-512 alone")
def test_tokens_are_equal_and_engines_without_fp8_are_not_met(lab: Lab, pool: CachePool) -> None:
    """The checkpoint has scales, and vLLM takes it at its word that KV is fp8."""
    model = lab.home / "calibrated"
    tiny_llama.make(model, seed=0, kv_scale=0.02)
    connector = transfer(settings(pool={"address": pool.address}))
    with lab.engine(**ROUNDED) as engine:
        expected = engine.generate(PROMPTS)
    with lab.engine(model=model, **ROUNDED) as engine:
        computed = engine.generate(PROMPTS)
        assert tokens_of(computed) != tokens_of(expected), "fp8 plays no part"
        for hits in (none_hit(PROMPTS), all_hit(PROMPTS)):
            engine.restart(connector, **ROUNDED)
            answers = engine.generate(PROMPTS)
            assert tokens_of(answers) == tokens_of(computed)
            assert cached_of(answers) == hits
        engine.restart(connector, kv_cache_dtype="bfloat16", **ROUNDED)
        others = engine.generate(PROMPTS)
        assert tokens_of(others) == tokens_of(expected)
        assert cached_of(others) == none_hit(PROMPTS)
