"""Answers in OpenAI's format: whole, and as chunks of a stream.

Beyond OpenAI's, answers hold

    usage.prompt_tokens_details.cached_tokens            prompt tokens whose KV was not computed
    usage.prompt_tokens_details.cached_tokens_by_tier    the same by where it was: device, host, disk, pool
    kvtier.ttft_s                                        arrival of the request (before tokenisation) to first token
    kvtier.token_ids                                     the answer, with the end-of-text token that ended it
    kvtier.token_ids_by_choice                           the same of all choices, if there are several
    kvtier.prompt_token_ids                              on demand

`kvtier` is in the whole answer, and in the chunk of a stream that has the `finish_reason`.
"""

import json
import time
from collections.abc import Sequence
from typing import Any

from kvtier_engine.api.generation import Piece
from kvtier_engine.api.logprobs import ChatLogprobs, CompletionLogprobs, Spelling
from kvtier_engine.scheduling.request import Completion, Logprobs

TIERS = ("device", "host", "disk", "pool")
LAST_EVENT = b"data: [DONE]\n\n"

Json = dict[str, Any]


class AnswerFormat:
    """How the answers to one request are written, of `/v1/chat/completions` or of `/v1/completions`.

    For one thread at a time; the chunks of a stream in order.
    """

    def __init__(  # noqa: PLR0913 - what a request may ask for
        self,
        *,
        chat: bool,
        request_id: str,
        model: str,
        prompt_token_ids: Sequence[int] | None = None,
        usage_chunk: bool = False,
        num_choices: int = 1,
        spelling: Spelling | None = None,
    ) -> None:
        """
        :param request_id: what the answer's `id` ends with.
        :param prompt_token_ids: goes into the answer; None leaves it out.
        :param usage_chunk: a stream then ends with the usage.
        :param spelling: of log probabilities; None: nobody asked for them.
        """
        self._chat, self._prompt_token_ids, self._usage_chunk = chat, prompt_token_ids, usage_chunk
        self._logprobs = [_logprobs(spelling, chat=chat) for _ in range(num_choices)] if spelling is not None else None
        self._num_choices = num_choices
        self._ended: list[Completion] = []
        """The completions of the choices that a stream has told the end of."""
        self._common = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, answers: Sequence[Piece], completions: Sequence[Completion]) -> Json:
        """The answer that is not streamed.

        :param answers: the choices, in order, whole.
        :param completions: what was computed for them: more than there are choices with `best_of`.
        """
        choices = [
            self._choice(index, self._content(piece.text), piece.logprobs, piece.done)
            for index, piece in enumerate(answers)
        ]
        token_ids = [list(piece.done.token_ids) for piece in answers if piece.done is not None]
        by_choice = {"token_ids_by_choice": token_ids} if len(token_ids) > 1 else {}
        return {
            "object": "chat.completion" if self._chat else "text_completion",
            **self._common,
            "choices": choices,
            "usage": _usage(completions),
            "kvtier": self._kvtier(completions[0], token_ids[0]) | by_choice,
        }

    def first_chunks(self) -> list[Json]:
        """What comes before all text."""
        if not self._chat:
            return []
        delta = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk(self._choice(index, delta, [], None)) for index in range(self._num_choices)]

    def chunks(self, piece: Piece) -> list[Json]:
        """What a piece of an answer adds to a stream."""
        chunks: list[Json] = []
        if piece.text:
            content: Json = {"delta": {"content": piece.text}} if self._chat else {"text": piece.text}
            chunks.append(self._chunk(self._choice(piece.branch, content, piece.logprobs, None)))
        if piece.done is not None:
            self._ended.append(piece.done)
            content = {"delta": Json()} if self._chat else {"text": ""}
            logprobs = [] if piece.text else piece.logprobs
            last = self._chunk(self._choice(piece.branch, content, logprobs, piece.done))
            chunks.append(last | {"kvtier": self._kvtier(piece.done, piece.done.token_ids)})
        return chunks

    def usage_chunks(self) -> list[Json]:
        """What comes after all answers."""
        return [self._chunk() | {"usage": _usage(self._ended)}] if self._usage_chunk else []

    def _content(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}

    def _choice(
        self, index: int, content: Json, logprobs: Sequence[tuple[int, Logprobs]], done: Completion | None
    ) -> Json:
        told = self._logprobs[index].next(logprobs) if self._logprobs is not None and logprobs else None
        finish_reason = None if done is None else done.finish_reason
        return {"index": index, **content, "logprobs": told, "finish_reason": finish_reason}

    def _chunk(self, *choices: Json) -> Json:
        chunk = {
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            **self._common,
            "choices": list(choices),
        }
        return chunk | {"usage": None} if self._usage_chunk else chunk

    def _kvtier(self, done: Completion, token_ids: Sequence[int]) -> Json:
        kvtier: Json = {"ttft_s": done.ttft_s, "token_ids": list(token_ids)}
        if self._prompt_token_ids is not None:
            kvtier["prompt_token_ids"] = list(self._prompt_token_ids)
        return kvtier


def _logprobs(spelling: Spelling, *, chat: bool) -> ChatLogprobs | CompletionLogprobs:
    return ChatLogprobs(spelling) if chat else CompletionLogprobs(spelling)


def event(data: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _usage(completions: Sequence[Completion]) -> Json:
    """The prompt counts once, and the answers all."""
    first, num_answer_tokens = completions[0], sum(len(done.token_ids) for done in completions)
    by_tier = dict.fromkeys(TIERS, 0) | dict(first.cached_by_tier)
    return {
        "prompt_tokens": first.num_prompt_tokens,
        "completion_tokens": num_answer_tokens,
        "total_tokens": first.num_prompt_tokens + num_answer_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(by_tier.values()), "cached_tokens_by_tier": by_tier},
    }
