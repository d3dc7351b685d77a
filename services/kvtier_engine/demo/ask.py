"""Asking an engine."""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.errors import KvtierError

REQUEST_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an engine said, and what of the prompt it had in its cache."""

    text: str
    token_ids: list[int]
    ttft_s: float
    """Seconds from the engine's receipt of the request to its first token."""
    prompt_tokens: int
    cached_tokens: int
    cached_by_tier: dict[str, int]

    def share_of(self, tier: str) -> float:
        """The share of the prompt that was in that tier."""
        return self.cached_by_tier.get(tier, 0) / self.prompt_tokens

    @property
    def num_saved_blocks(self) -> int:
        """How many blocks of 16 tokens the engine has computed for this, prompt and answer, and offers to the pool."""
        return (self.prompt_tokens + len(self.token_ids) - 1) // 16 - self.cached_tokens // 16


def chat(url: str, messages: Sequence[Mapping[str, str]], max_tokens: int) -> Answer:
    """One greedy chat completion by the engine at `url`. Raises `KvtierError` as `post` does."""
    body = {"messages": list(messages), "temperature": 0, "max_tokens": max_tokens}
    answer: Any = post(f"{url}/v1/chat/completions", body)
    usage, extension = answer["usage"], answer["kvtier"]
    details = usage["prompt_tokens_details"]
    return Answer(
        text=answer["choices"][0]["message"]["content"],
        token_ids=extension["token_ids"],
        ttft_s=extension["ttft_s"],
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=details["cached_tokens"],
        cached_by_tier=details["cached_tokens_by_tier"],
    )


def forget(url: str) -> None:
    """Makes the engine at `url` forget every block on its device and in its own tiers. The pool keeps its blocks."""
    post(f"{url}/v1/cache/reset", {})


def post(url: str, body: Mapping[str, Any]) -> Any:
    """POSTs JSON and returns the JSON answer. Raises `KvtierError` with the server's message."""
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise KvtierError(f"{url} answered {error.code}: {error.read().decode(errors='replace')[:2000]}") from error
    except OSError as error:
        raise KvtierError(f"{url} cannot be reached: {error}") from error
