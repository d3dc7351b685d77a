"""The OpenAI-compatible wire format: `/v1/completions` and `/v1/chat/completions`, not streamed.

Beyond OpenAI's, requests may say `return_prompt_token_ids`, and responses hold

    usage.prompt_tokens_details.cached_tokens            prompt tokens whose KV was not computed
    usage.prompt_tokens_details.cached_tokens_by_tier    the same by where it was: device, host, disk, pool
    kvtier.ttft_s                                        arrival of the request (before tokenisation) to first token
    kvtier.token_ids                                     the answer, with the end-of-text token that ended it
    kvtier.prompt_token_ids                              on demand

Parameters that this engine does not honour are refused unless they ask for nothing, so that an answer is
never silently of another kind than what was asked for.
"""

import time
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvtier_engine.request import Completion

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default `max_tokens` of `/v1/completions`."""
TIERS = ("device", "host", "disk", "pool")

TokenLimit = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


class _SamplingBody(BaseModel):
    """What both kinds of requests share."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    max_tokens: TokenLimit | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    seed: Seed | None = None
    return_prompt_token_ids: bool = False
    user: str | None = None
    """Accepted and ignored."""
    n: Literal[1] = 1
    stream: Literal[False] = False
    top_p: Annotated[float, Field(ge=1, le=1)] = 1.0
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] = 0.0
    presence_penalty: Annotated[float, Field(ge=0, le=0)] = 0.0


class CompletionBody(_SamplingBody):
    """`POST /v1/completions`."""

    prompt: str | list[int]
    """Text, or token ids."""


class Message(BaseModel):
    """One turn."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "user", "assistant"]
    content: str


class ChatBody(_SamplingBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: TokenLimit | None = None
    """OpenAI's newer name of `max_tokens`; counts when both are given."""


def completion_response(request_id: str, model: str, text: str, done: Completion) -> dict[str, Any]:
    """The answer to `/v1/completions`."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": done.finish_reason}
    return _response(f"cmpl-{request_id}", "text_completion", model, choice, done)


def chat_response(request_id: str, model: str, text: str, done: Completion) -> dict[str, Any]:
    """The answer to `/v1/chat/completions`."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": done.finish_reason}
    return _response(f"chatcmpl-{request_id}", "chat.completion", model, choice, done)


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _response(response_id: str, kind: str, model: str, choice: dict[str, Any], done: Completion) -> dict[str, Any]:
    return {
        "id": response_id,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": _usage(done),
        "kvtier": {"ttft_s": done.ttft_s, "token_ids": list(done.token_ids)},
    }


def _usage(done: Completion) -> dict[str, Any]:
    num_answer_tokens = len(done.token_ids)
    by_tier = dict.fromkeys(TIERS, 0) | dict(done.cached_by_tier)
    return {
        "prompt_tokens": done.num_prompt_tokens,
        "completion_tokens": num_answer_tokens,
        "total_tokens": done.num_prompt_tokens + num_answer_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(by_tier.values()), "cached_tokens_by_tier": by_tier},
    }
