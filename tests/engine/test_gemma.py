"""Gemma 2 and 3: sliding windows, soft caps and norms as in transformers, and the same tokens from the cache."""

import copy
import itertools
import random
from typing import Any

import pytest
import torch

from engine_model_rig import small_folder
from engine_rig import EngineRig
from hierarchy_rig import memory_tier
from kvtier.errors import ConfigError
from kvtier_engine.model.kv_groups import KVGroups
from kvtier_engine.model.llama import Chunk, LlamaModel
from kvtier_engine.model.model_folder import ModelFolder, open_model
from kvtier_engine.model.paged_kv import allocate_kv
from kvtier_engine.model.weights import load_weights
from kvtier_engine.scheduling.request import NO_BLOCK

WINDOW, LENGTH = 24, 100
COMMON: dict[str, Any] = {
    "sliding_window": WINDOW, "query_pre_attn_scalar": 24, "tie_word_embeddings": True, "bos_token_id": 0,
    "eos_token_id": None, "pad_token_id": 0, "attn_implementation": "eager",
}  # fmt: skip
GEMMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma 2": ("Gemma2", {"num_hidden_layers": 3, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}),
    "Gemma 3": (
        "Gemma3",
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            },
        },
    ),
}
Gemma = tuple[ModelFolder, Any]


@pytest.fixture(scope="module", params=GEMMAS.values(), ids=GEMMAS.keys())
def gemma(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Gemma:
    family, changes = request.param
    folder = tmp_path_factory.mktemp("gemma")
    path, hf = small_folder(folder, family, **COMMON, **changes)
    return open_model(path, folder), hf.eval()


def model_of(folder: ModelFolder, dtype: torch.dtype = torch.float32) -> LlamaModel:
    return LlamaModel(folder.config, load_weights(folder.weight_files, folder.config, dtype))


def prompt_of(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(1, 320), k=length)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_logits_are_as_exact_as_transformers(gemma: Gemma, dtype: torch.dtype) -> None:
    """Half of the prompt cached, ours are no farther from those in float64 than transformers' in the same dtype."""
    folder, hf = gemma
    ids, model, table = prompt_of(LENGTH), model_of(folder, dtype), [*range(1, 7), 0]
    rounded, precise = copy.deepcopy(hf).to(dtype), copy.deepcopy(hf).to(dtype).double()
    for each in (rounded, precise):  # not rounded by transformers either, when it loads a model in `dtype`
        for mine, kept in zip(each.model.rotary_emb.buffers(), hf.model.rotary_emb.buffers(), strict=True):
            mine.data = kept.data
    with torch.inference_mode():
        theirs, exact = (each(torch.tensor([ids])).logits[0, -1].double() for each in (rounded, precise))
    kv = allocate_kv(folder.config, len(table), 16, dtype)
    model.forward([Chunk(ids[:50], 0, table)], kv)
    ours = model.forward([Chunk(ids[50:], 50, table)], kv)[0].double()
    our_error, their_error = ((each - exact).square().mean().sqrt().item() for each in (ours, theirs))
    print(f"{dtype}: rms error {our_error:.2e}, transformers {their_error:.2e}")
    assert 0 < our_error <= 2 * their_error


@pytest.fixture(scope="module")
def answers(gemma: Gemma) -> list[tuple[list[int], tuple[int, ...]]]:
    """Prompts and transformers' answers: some prompts leave a known one within a block, and within its window."""
    document, answered = prompt_of(LENGTH), []
    for prompt in (document, document[:61] + prompt_of(30, seed=2), prompt_of(20, seed=3), [*document[:90], 7, 8, 9]):
        with torch.inference_mode():
            found = gemma[1].generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=WINDOW + 10)
        answered.append((prompt, tuple(found[0, len(prompt) :].tolist())))
    return answered


@pytest.mark.parametrize("place", ["device", "pool", "crowded"])
def test_tokens_are_those_of_transformers_cold_and_cached(
    gemma: Gemma, answers: list[tuple[list[int], tuple[int, ...]]], place: str
) -> None:
    """In another engine over one pool, too, as two branches, and where requests lose their blocks to each other."""
    shared = memory_tier("pool") if place == "pool" else None
    little = {"num_blocks": 75, "num_slots": 40} if place == "crowded" else {"num_blocks": 200, "num_slots": 150}
    settings: dict[str, Any] = {"model": model_of(gemma[0]), "tiers": place != "device", "shared": shared, **little}
    cold = EngineRig(num_blocks=150, model=settings["model"], tiers=False, cache=False)
    warm, fresh = (EngineRig(max_batch_tokens=37, cache_aware=True, **settings) for _ in range(2))
    for number, rig in enumerate([cold, warm, warm, fresh] if place == "pool" else [warm, warm, warm]):
        requests = [rig.add(prompt, WINDOW + 10, num_branches=1 + number % 2) for prompt, _ in answers]
        rig.run()
        for request, (_, expected) in zip(requests, answers, strict=True):
            assert {answer.token_ids for answer in rig.answers[request].values()} == {expected}
    found = {tier for rig in (warm, fresh) for done in rig.done.values() for tier in done.cached_by_tier}
    assert found >= {"pool": {"device", "host", "pool"}}.get(place, {"device"})
    assert place != "crowded" or warm.counter("engine_preemptions") > 0
    for rig in (cold, warm, fresh):
        rig.close()
    if shared is not None:
        shared.close()


def test_only_soft_caps_keep_a_gemma_from_invariance(gemma: Gemma) -> None:
    """Windows do not: the same bits, cold and cached, in any chunks."""
    folder, _ = gemma
    weights = load_weights(folder.weight_files, folder.config, torch.bfloat16)
    if folder.config.attention_soft_cap is not None:
        with pytest.raises(ConfigError, match="soft caps"):
            LlamaModel(folder.config, weights, batch_invariant=True)
        return
    model, ids, results = LlamaModel(folder.config, weights, batch_invariant=True), prompt_of(300), []
    for cuts in ((0, 300), (0, 1, 70, 298, 299, 300), (0, 256, 257, 300)):
        kv = allocate_kv(folder.config, 19, 16, torch.bfloat16)
        for start, stop in itertools.pairwise(cuts):
            logits = model.forward([Chunk(ids[start:stop], start, range(19))], kv)
        results.append((logits, kv.tensor))
    for logits, kv_tensor in results[1:]:
        assert torch.equal(logits, results[0][0])
        assert torch.equal(kv_tensor, results[0][1])
    groups = KVGroups.of(folder.config)
    kv, blocks = allocate_kv(folder.config, 57, 16, torch.bfloat16, groups=groups), [*range(57)]
    kv.tensor.fill_(float("nan"))
    for start, stop in itertools.pairwise((0, 30, 70, 298, 299, 300)):
        left = max(0, start - WINDOW + 1) // 16
        tables = [[NO_BLOCK] * left + blocks[group + 3 * left :: 3] for group in (1, 2)]
        logits = model.forward([Chunk(ids[start:stop], start, blocks[::3], windowed_tables=tables)], kv)
    assert torch.equal(logits, results[0][0]), "nor do blocks of their own, without those that the window has left"
