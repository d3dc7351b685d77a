"""Draws a token from logits."""

import torch
from torch import Tensor

from kvtier_engine.scheduling.request import Logprobs, Request

_FIRST_LOOK = 256
"""This many of the likeliest tokens nearly always hold a nucleus; finding them costs a fortieth of sorting all."""
_NEXT_LOOK = 16
"""This many times more are looked at when they do not."""


def sample(logits: Tensor, request: Request) -> int:
    """The next token of `request`. `logits`: float32 `[vocab_size]`. Draws advance the request's generator only.

    Draws are made on CPU, so that a seed gives the same ones wherever the model runs.
    """
    sampling = request.sampling
    if sampling.temperature == 0:
        return int(logits.argmax())
    # float64 and the largest at 0, so that no temperature above 0, however small, makes an infinity or NaN.
    wide = logits.double().cpu()
    probabilities = torch.softmax((wide - wide.max()) / sampling.temperature, dim=-1)
    if sampling.top_p == 1:
        return _draw(probabilities.cumsum(0), request.generator)
    ids, mass = _nucleus(probabilities, sampling.top_p)
    return int(ids[_draw(mass, request.generator)])


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
