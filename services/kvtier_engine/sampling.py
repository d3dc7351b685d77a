"""From logits to a token."""

import torch
from torch import Tensor

from kvtier_engine.request import Request


def sample(logits: Tensor, request: Request) -> int:
    """The next token of `request`. `logits`: float32 `[vocab_size]`. Draws advance the request's generator only."""
    temperature = request.sampling.temperature
    if temperature == 0:
        return int(logits.argmax())
    # float64 and the largest at 0, so that no temperature above 0, however small, makes an infinity or NaN.
    probabilities = torch.softmax((logits.double() - logits.max()) / temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=request.generator))
