"""Draws a token from logits."""

import numpy as np
import torch
from torch import Tensor

from kvtier_engine.scheduling.completion import Logprobs
from kvtier_engine.scheduling.request import Request

_FIRST_LOOK = 256
"""This many of the likeliest tokens nearly always hold a nucleus; finding them costs a fortieth of sorting all."""
_NEXT_LOOK = 16
"""This many times more are looked at when they do not."""
_MOST = torch.finfo(torch.float32).max


def sample(logits: Tensor, request: Request) -> int:
    """The next token of `request`. `logits`: float32 `[vocab_size]`. Draws advance the request's generator only.

    Draws are made on CPU, so that a seed gives the same ones wherever the model runs.

    :raises InvalidInputError: the request's constraint lets its answer not go on.
    :raises ValueError: the logits are no numbers.
    """
    sampling = request.sampling
    logits = _adjusted(logits, request)
    if sampling.temperature == 0:
        return int(logits.argmax())
    # float64 and the largest at 0, so that no temperature above 0, however small, makes an infinity or NaN.
    wide = logits.double().cpu()
    probabilities = torch.softmax((wide - wide.max()) / sampling.temperature, dim=-1)
    if sampling.top_p == 1:
        return _draw(probabilities.cumsum(0), request.generator)
    ids, mass = _nucleus(probabilities, sampling.top_p)
    return int(ids[_draw(mass, request.generator)])


def _adjusted(logits: Tensor, request: Request) -> Tensor:
    """The logits after penalties, bias and constraint; the same tensor where there are none.

    Penalties of answers are OpenAI's. That of repetition is of Keskar et al., "CTRL", 2019, as in transformers, vLLM;
    the smallest ones make the largest numbers, and no infinities, which have no difference to draw from.
    """
    sampling = request.sampling
    if sampling.repetition_penalty != 1:
        logits = logits.clone()
        ids = torch.from_numpy(np.unique(request.tokens)).to(logits.device)
        known = logits[ids]
        penalty = sampling.repetition_penalty
        logits[ids] = torch.where(known > 0, known / penalty, known * penalty).clamp(-_MOST, _MOST)
    if sampling.presence_penalty or sampling.frequency_penalty:
        logits, answer = logits.clone(), np.array(request.tokens[request.num_prompt_tokens :], np.int64)
        ids, counts = (torch.from_numpy(each).to(logits.device) for each in np.unique(answer, return_counts=True))
        logits[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    if sampling.logit_bias:
        logits = logits.clone()
        token_ids, biases = zip(*sampling.logit_bias, strict=True)
        logits[list(token_ids)] += torch.tensor(biases, device=logits.device)
    if request.constraint is not None:
        logits = logits.masked_fill(~request.constraint.allowed().to(logits.device), -torch.inf)
    return logits


def logprobs_of(logits: Tensor, token_id: int, num_top: int) -> Logprobs:
    """What the model itself says of a token, and of the `num_top` likeliest ones. `logits`: float32 `[vocab_size]`."""
    wide = logits.double().cpu()
    normed = wide - wide.logsumexp(0)
    values, ids = normed.topk(min(num_top, normed.numel()))
    return Logprobs(float(normed[token_id]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def _draw(mass: Tensor, generator: torch.Generator) -> int:
    """An index, each as often as `mass` grows there. Twenty times faster than `torch.multinomial`.

    The drawn number is in (0, mass[-1]], so that what has no probability is never found.
    """
    if not mass[-1] > 0:
        raise ValueError("logits that are no numbers: no token can be drawn")
    number = (1 - torch.rand(1, dtype=torch.float64, generator=generator)) * mass[-1]
    return int(torch.searchsorted(mass, number))


def _nucleus(probabilities: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The fewest of the likeliest tokens that together reach `top_p`, at least one: their ids and cumulated mass.

    Nucleus sampling: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2019.
    """
    num_looked_at = min(_FIRST_LOOK, probabilities.numel())
    while True:
        likeliest, ids = probabilities.topk(num_looked_at)
        mass = likeliest.cumsum(0)
        if mass[-1] >= top_p or num_looked_at == probabilities.numel():
            num_kept = int((mass < top_p).sum()) + 1
            return ids[:num_kept], mass[:num_kept]
        num_looked_at = min(num_looked_at * _NEXT_LOOK, probabilities.numel())
