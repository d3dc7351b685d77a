"""What a request gets: tokens as they come, and the end of each answer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "failed"]


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The natural logarithms of probabilities that the model itself gives, whatever the sampling makes of them."""

    of_token: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens, the likeliest first."""


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token of an answer."""

    token_id: int
    branch: int
    """The index of the answer."""
    logprobs: Logprobs | None
    """None: nobody asked for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The end of an answer."""

    token_ids: tuple[int, ...]
    """New tokens, with the end-of-text token if that ended them."""
    finish_reason: FinishReason
    num_prompt_tokens: int
    cached_by_tier: Mapping[str, int]
    """Prompt tokens that were not computed, by where their KV was: `device` and the names of the tiers."""
    ttft_s: float | None
    """Seconds from the arrival of the request to its first new token; None when there was none."""
    branch: int = 0
    """The index of the answer."""
    logprobs: tuple[Logprobs, ...] = ()
    """The log probabilities of each new token; empty when nobody asked for them."""
    failure: str = ""
    """What of the request is to blame for `failed`; empty: nothing is."""

    def attributes(self) -> dict[str, str | int]:
        """What a trace says of the request."""
        cached = {f"cached_tokens.{tier}": count for tier, count in self.cached_by_tier.items()}
        counts = {"prompt_tokens": self.num_prompt_tokens, "answer_tokens": len(self.token_ids)}
        return {**counts, **cached, "finish_reason": self.finish_reason}


DoneCallback = Callable[[Completion], None]
"""Called once for each branch, in the engine's thread; must not block."""
TokenCallback = Callable[[NewToken], None]
"""Called with each new token, in the engine's thread and within its steps: must be cheap and not block."""
