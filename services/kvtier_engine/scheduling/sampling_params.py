"""What a request asks of its answer: how tokens are chosen, and when to stop."""

import hashlib
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvtier_engine.scheduling.beam_search import BeamSettings


class Constraint(Protocol):
    """Which tokens an answer may have next: `JsonAnswer`. Scheduler thread only, once it belongs to a request."""

    def copy(self) -> "Constraint":
        """One that goes on by itself."""

    def allowed(self) -> Tensor:
        """bool `[vocab_size]` on CPU."""

    def accept(self, token_id: int) -> None:
        """This one has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen, and when to stop."""

    max_tokens: int
    """The most new tokens, 1 at the least."""
    temperature: float = 0.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    """Only the likeliest tokens that together are at least so likely are drawn; above 0, 1 draws from all."""
    seed: int | None = None
    """The seed of the draws: the same seed gives the same draws; None seeds from the system."""
    eos_token_ids: tuple[int, ...] = ()
    """Any of these ends the answer; it is the answer's last token."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token that the answer has already."""
    frequency_penalty: float = 0.0
    """Taken from the logit of a token as often as the answer has it."""
    repetition_penalty: float = 1.0
    """The number by which logits of tokens of prompt and answer are divided, or multiplied if they are negative."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Added to the logits of these tokens."""
    constraint: Constraint | None = None
    """The constraint at its beginning, of which every branch takes a copy. None: any token may come."""
    num_branches: int = 1
    """How many answers are drawn. Their draws are independent, and those of a branch do not depend on how many there
    are: the first branch answers what it would answer alone."""
    beams: BeamSettings | None = None
    """Searches for the likeliest answers, as many branches as the search is wide; None draws them."""
    num_top: int | None = None
    """How many of the likeliest tokens come with each token, all with their log probabilities; None: neither does."""

    def draws(self, branch: int) -> torch.Generator:
        """Returns the draws of the branch with this index: the first one's seed is that of the request."""
        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        elif branch == 0:
            generator.manual_seed(self.seed)
        else:
            digest = hashlib.sha256(f"{self.seed}/{branch}".encode()).digest()
            generator.manual_seed(int.from_bytes(digest[:8], "little"))
        return generator
