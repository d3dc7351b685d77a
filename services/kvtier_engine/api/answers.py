"""Answers in OpenAI's format: whole, and as chunks of a stream.

Beyond OpenAI's, answers hold

    usage.prompt_tokens_details.cached_tokens            prompt tokens whose KV was not computed
    usage.prompt_tokens_details.cached_tokens_by_tier    the same by where it was: device, host, disk, pool
    kvtier.ttft_s                                        arrival of the request (before tokenisation) to first token
    kvtier.token_ids                                     the answer, with the end-of-text token that ended it
    kvtier.token_ids_by_choice                           the same of all choices, if there are several
    kvtier.prompt_token_ids                              on demand; of the first prompt, if there are several
    kvtier.prompt_token_ids_by_choice                    the same for all choices, if there are several prompts

`kvtier` is in the whole answer, and in the chunk of a stream that has the `finish_reason`.
"""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvtier_engine.api.generation import Piece
from kvtier_engine.api.logprobs import ChatLogprobs, CompletionLogprobs, Spelling
from kvtier_engine.api.tool_answers import ToolAnswer
from kvtier_engine.scheduling.completion import Completion, Logprobs

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
        prompts: Sequence[Sequence[int]],
        show_prompts: bool = False,
        usage_chunk: bool = False,
        num_choices: int = 1,
        spelling: Spelling | None = None,
        tools: Callable[[], ToolAnswer] | None = None,
    ) -> None:
        """
        :param request_id: what the answer's `id` ends with.
        :param prompts: the tokens of all prompts.
        :param show_prompts: they go into the answer.
        :param usage_chunk: a stream then ends with the usage.
        :param num_choices: of all prompts together, the same number of each.
        :param spelling: of log probabilities; None: nobody asked for them.
        :param tools: makes what reads the calls of one choice; None: all text is content.
        """
        self._chat, self._prompts, self._show_prompts, self._usage_chunk = chat, prompts, show_prompts, usage_chunk
        self._logprobs = [_logprobs(spelling, chat=chat) for _ in range(num_choices)] if spelling is not None else None
        self._tools = [tools() for _ in range(num_choices)] if tools is not None else None
        self._untold: dict[int, list[tuple[int, Logprobs]]] = {}
        """Log probabilities of tokens of which a stream has told nothing yet, since they may belong to a call."""
        self._num_choices = num_choices
        self._ended: dict[int, Completion] = {}
        """The completions of the choices that a stream has told the end of."""
        self._common = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, answers: Sequence[Piece], completions: Sequence[Sequence[Completion]]) -> Json:
        """The answer that is not streamed.

        :param answers: the choices, in order, whole.
        :param completions: what was computed for them, of each prompt: more than there are choices with `best_of`.
        """
        choices = [
            self._choice(index, self._content(index, piece.text), piece.logprobs, piece.done)
            for index, piece in enumerate(answers)
        ]
        token_ids = [list(piece.done.token_ids) for piece in answers if piece.done is not None]
        by_choice = {"token_ids_by_choice": token_ids} if len(token_ids) > 1 else {}
        return {
            "object": "chat.completion" if self._chat else "text_completion",
            **self._common,
            "choices": choices,
            "usage": _usage(completions),
            "kvtier": self._kvtier(0, completions[0][0], token_ids[0]) | by_choice | self._prompts_by_choice(),
        }

    def first_chunks(self) -> list[Json]:
        """What comes before all text."""
        if not self._chat:
            return []
        delta = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk(self._choice(index, delta, [], None)) for index in range(self._num_choices)]

    def chunks(self, piece: Piece) -> list[Json]:
        """What a piece of an answer adds to a stream."""
        deltas = self._deltas(piece)
        logprobs = [*self._untold.pop(piece.branch, []), *piece.logprobs]
        if not deltas and piece.done is None:
            self._untold[piece.branch] = logprobs
            return []
        chunks: list[Json] = []
        for delta in deltas:
            chunks.append(self._chunk(self._choice(piece.branch, delta, logprobs, None)))
            logprobs = []
        if piece.done is not None:
            self._ended[piece.branch] = piece.done
            content: Json = {"delta": Json()} if self._chat else {"text": ""}
            last = self._chunk(self._choice(piece.branch, content, logprobs, piece.done))
            chunks.append(last | {"kvtier": self._kvtier(piece.branch, piece.done, piece.done.token_ids)})
        return chunks

    def _deltas(self, piece: Piece) -> list[Json]:
        if self._tools is not None:
            tools = self._tools[piece.branch]
            return [{"delta": delta} for delta in tools.deltas(piece.text, is_last=piece.done is not None)]
        if not piece.text:
            return []
        return [{"delta": {"content": piece.text}} if self._chat else {"text": piece.text}]

    def usage_chunks(self) -> list[Json]:
        """What comes after all answers."""
        if not self._usage_chunk:
            return []
        of_prompt = self._num_choices // len(self._prompts)
        ended = [self._ended[choice] for choice in range(self._num_choices)]
        prompts = [ended[first : first + of_prompt] for first in range(0, self._num_choices, of_prompt)]
        return [self._chunk() | {"usage": _usage(prompts)}]

    def _content(self, index: int, text: str) -> Json:
        if not self._chat:
            return {"text": text}
        content: Json = {"content": text} if self._tools is None else self._tools[index].message(text)
        return {"message": {"role": "assistant", **content}}

    def _choice(
        self, index: int, content: Json, logprobs: Sequence[tuple[int, Logprobs]], done: Completion | None
    ) -> Json:
        told = self._logprobs[index].next(logprobs) if self._logprobs is not None and logprobs else None
        finish_reason: str | None = None if done is None else done.finish_reason
        if finish_reason == "stop" and self._tools is not None and self._tools[index].has_calls:
            finish_reason = "tool_calls"
        return {"index": index, **content, "logprobs": told, "finish_reason": finish_reason}

    def _chunk(self, *choices: Json) -> Json:
        chunk = {
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            **self._common,
            "choices": list(choices),
        }
        return chunk | {"usage": None} if self._usage_chunk else chunk

    def _kvtier(self, index: int, done: Completion, token_ids: Sequence[int]) -> Json:
        kvtier: Json = {"ttft_s": done.ttft_s, "token_ids": list(token_ids)}
        if self._show_prompts:
            kvtier["prompt_token_ids"] = self._prompt_of(index)
        return kvtier

    def _prompts_by_choice(self) -> Json:
        if not self._show_prompts or len(self._prompts) == 1:
            return {}
        return {"prompt_token_ids_by_choice": [self._prompt_of(index) for index in range(self._num_choices)]}

    def _prompt_of(self, index: int) -> list[int]:
        return list(self._prompts[index * len(self._prompts) // self._num_choices])


def _logprobs(spelling: Spelling, *, chat: bool) -> ChatLogprobs | CompletionLogprobs:
    return ChatLogprobs(spelling) if chat else CompletionLogprobs(spelling)


def event(data: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _usage(prompts: Sequence[Sequence[Completion]]) -> Json:
    """Each prompt counts once, and the answers all."""
    firsts = [completions[0] for completions in prompts]
    num_answer_tokens = sum(len(done.token_ids) for completions in prompts for done in completions)
    num_prompt_tokens = sum(first.num_prompt_tokens for first in firsts)
    by_tier = dict.fromkeys(TIERS, 0)
    for first in firsts:
        for tier, num_tokens in first.cached_by_tier.items():
            by_tier[tier] = by_tier.get(tier, 0) + num_tokens
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_answer_tokens,
        "total_tokens": num_prompt_tokens + num_answer_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(by_tier.values()), "cached_tokens_by_tier": by_tier},
    }
