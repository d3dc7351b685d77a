"""Answers of the rig's model by a loop that knows no scheduler, no block pool and no cache."""

from collections.abc import Sequence

import torch

from engine_rig import TOKENS_PER_BLOCK
from kvtier_engine.model.llama import Chunk, LlamaModel
from kvtier_engine.model.paged_kv import allocate_kv
from kvtier_engine.scheduling.beam_search import BeamSearch
from kvtier_engine.scheduling.request import Request
from kvtier_engine.scheduling.sampling import sample
from kvtier_engine.scheduling.sampling_params import Sampling
from tiny_model import CONFIG, MODEL

_NUM_BLOCKS = CONFIG.max_position_embeddings // TOKENS_PER_BLOCK


def naive_beams(tokens: Sequence[int], sampling: Sampling, model: LlamaModel = MODEL) -> list[tuple[int, ...]]:
    """What a search finds, every beam computed anew in every step. The search itself is held against transformers'."""
    assert sampling.beams is not None
    search = BeamSearch(sampling.beams, sampling.max_tokens, sampling.eos_token_ids)
    answers: dict[int, list[int]] = {0: []}
    while answers:
        for beam, answer in answers.items():
            kv = allocate_kv(model._config, _NUM_BLOCKS, TOKENS_PER_BLOCK, torch.float32)
            search.offer(beam, model.forward([Chunk([*tokens, *answer], 0, range(_NUM_BLOCKS))], kv)[0])
        answers = {beam: [*answers[parent], token] for parent, beam, token in search.advance(answers)}
    return [hypothesis.token_ids for hypothesis in search.found]


def naive_answer(
    tokens: Sequence[int], sampling: Sampling, branch: int = 0, model: LlamaModel = MODEL
) -> tuple[tuple[int, ...], list[float]]:
    """The tokens of one branch, and the log probability of each."""
    kv = allocate_kv(model._config, _NUM_BLOCKS, TOKENS_PER_BLOCK, torch.float32)
    asker = Request(
        request_id=1, tokens=list(tokens), sampling=sampling, hasher=None, on_done=lambda _: None, arrived_at=0.0
    )
    asker.generator = sampling.draws(branch)
    new, start, logprobs = list(tokens), 0, []
    while asker.num_answer_tokens < sampling.max_tokens:
        logits = model.forward([Chunk(new, start, range(_NUM_BLOCKS))], kv)[0]
        token_id = sample(logits, asker)
        logprobs.append(float(torch.log_softmax(logits.double(), 0)[token_id]))
        start += len(new)
        new = [token_id]
        asker.tokens.append(token_id)
        if token_id in sampling.eos_token_ids:
            break
    return tuple(asker.tokens[len(tokens) :]), logprobs
