"""Answers in OpenAI's format: whole, as chunks of a stream, and errors.

Beyond OpenAI's, answers hold

    usage.prompt_tokens_details.cached_tokens            prompt tokens whose KV was not computed
    usage.prompt_tokens_details.cached_tokens_by_tier    the same by where it was: device, host, disk, pool
    kvtier.ttft_s                                        arrival of the request (before tokenisation) to first token
    kvtier.token_ids                                     the answer, with the end-of-text token that ended it
    kvtier.prompt_token_ids                              on demand

`kvtier` is in the whole answer, and in the chunk of a stream that has the `finish_reason`.
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvtier_engine.scheduling.request import Completion

TIERS = ("device", "host", "disk", "pool")
LAST_EVENT = b"data: [DONE]\n\n"

Json = dict[str, Any]


class AnswerFormat:
    """How one answer is written, of `/v1/chat/completions` or of `/v1/completions`. Immutable."""

    def __init__(
        self,
        *,
        chat: bool,
        request_id: str,
        model: str,
        prompt_token_ids: Sequence[int] | None = None,
        usage_chunk: bool = False,
    ) -> None:
        """
        :param request_id: what the answer's `id` ends with.
        :param prompt_token_ids: goes into the answer; None leaves it out.
        :param usage_chunk: a stream then ends with the usage.
        """
        self._chat, self._prompt_token_ids, self._usage_chunk = chat, prompt_token_ids, usage_chunk
        self._common = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, text: str, done: Completion) -> Json:
        """The answer that is not streamed."""
        content = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        return {
            "object": "chat.completion" if self._chat else "text_completion",
            **self._common,
            "choices": [_choice(content, done.finish_reason)],
            "usage": _usage(done),
            "kvtier": self._kvtier(done),
        }

    def first_chunks(self) -> list[Json]:
        """What comes before all text."""
        return [self._chunk({"delta": {"role": "assistant", "content": ""}})] if self._chat else []

    def text_chunk(self, text: str) -> Json:
        return self._chunk({"delta": {"content": text}} if self._chat else {"text": text})

    def last_chunks(self, done: Completion) -> list[Json]:
        """What comes after all text."""
        last = self._chunk({"delta": {}} if self._chat else {"text": ""}, done.finish_reason)
        chunks = [last | {"kvtier": self._kvtier(done)}]
        if self._usage_chunk:
            chunks.append(last | {"choices": [], "usage": _usage(done)})
        return chunks

    def _chunk(self, content: Mapping[str, Any], finish_reason: str | None = None) -> Json:
        chunk = {
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            **self._common,
            "choices": [_choice(content, finish_reason)],
        }
        return chunk | {"usage": None} if self._usage_chunk else chunk

    def _kvtier(self, done: Completion) -> Json:
        kvtier: Json = {"ttft_s": done.ttft_s, "token_ids": list(done.token_ids)}
        if self._prompt_token_ids is not None:
            kvtier["prompt_token_ids"] = list(self._prompt_token_ids)
        return kvtier


def event(data: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> Json:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _choice(content: Mapping[str, Any], finish_reason: str | None) -> Json:
    return {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}


def _usage(done: Completion) -> Json:
    num_answer_tokens = len(done.token_ids)
    by_tier = dict.fromkeys(TIERS, 0) | dict(done.cached_by_tier)
    return {
        "prompt_tokens": done.num_prompt_tokens,
        "completion_tokens": num_answer_tokens,
        "total_tokens": done.num_prompt_tokens + num_answer_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(by_tier.values()), "cached_tokens_by_tier": by_tier},
    }
