"""Streams and stop sequences of a real model over HTTP: what comes piece by piece is what comes whole."""

from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from engine_http_rig import parse_event
from engine_process import FRANCE, MODEL_NAME, EngineProcess, until

COUNT = "Count to a million: 1, 2, 3,"


def test_a_streamed_chat(official: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL_NAME, "messages": FRANCE, "temperature": 0}
    whole = official.chat.completions.create(**ask)
    chunks = list(official.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    *with_choice, last = chunks
    deltas = [chunk.choices[0].delta for chunk in with_choice]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert all(delta.role is None for delta in deltas[1:])
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in with_choice] == [None] * (len(deltas) - 1) + ["stop"]
    assert {(chunk.id, chunk.created, chunk.object) for chunk in chunks} == {
        (last.id, last.created, "chat.completion.chunk")
    }
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 8
    assert last.usage.prompt_tokens == 42
    assert all(chunk.usage is None for chunk in with_choice)
    extra = with_choice[-1].model_extra
    assert extra is not None
    assert len(extra["kvtier"]["token_ids"]) == 8


def test_choices_of_a_chat_with_log_probabilities(official: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL_NAME, "messages": FRANCE, "seed": 1, "n": 3, "max_tokens": 12}
    whole = official.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
    chunks = [
        chunk.choices[0]
        for chunk in official.chat.completions.create(**ask, logprobs=True, top_logprobs=2, stream=True)
    ]
    assert len({choice.message.content for choice in whole.choices}) > 1
    for choice in whole.choices:
        mine = [chunk for chunk in chunks if chunk.index == choice.index]
        assert "".join(chunk.delta.content or "" for chunk in mine) == choice.message.content
        assert mine[0].delta.role == "assistant"
        assert mine[-1].finish_reason == choice.finish_reason
        assert choice.logprobs is not None
        entries = choice.logprobs.content
        assert entries is not None
        assert b"".join(bytes(entry.bytes or []) for entry in entries).decode() == choice.message.content
        assert all(len(entry.top_logprobs) == 2 and entry.logprob <= entry.top_logprobs[0].logprob for entry in entries)
        told = [chunk.logprobs for chunk in mine if chunk.logprobs is not None]
        assert [entry.token for each in told for entry in each.content or []] == [entry.token for entry in entries]


class _Ship(BaseModel):
    kind: Literal["sail", "steam"]
    masts: Annotated[int, Field(ge=1, le=5)]
    flags: Annotated[list[Literal["red", "blue"]], Field(max_length=2)]


def test_answers_that_fit_a_schema(official: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Describe a ship as JSON."}]
    ask: dict[str, Any] = {"model": MODEL_NAME, "messages": messages, "max_tokens": 60}
    parsed = official.chat.completions.parse(**ask, response_format=_Ship, n=2, seed=0)
    assert all(choice.finish_reason == "stop" and choice.message.parsed for choice in parsed.choices)
    ask["max_tokens"] = 8
    chunks = official.chat.completions.create(**ask, response_format={"type": "json_object"}, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text.lstrip().startswith("{")
    many = {"type": "object", "properties": {str(number): {"type": "string"} for number in range(1000)}}
    for schema, reason in (
        ({"not": {"type": "string"}}, "Unimplemented keys"),
        ({"$ref": "#"}, "no answer"),
        (many, "cannot be held to it: Parser Error: Current row has"),
    ):
        wrong: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        with pytest.raises(openai.BadRequestError, match=reason):
            official.chat.completions.create(**ask, temperature=0, response_format=wrong)


def test_a_streamed_completion(official: openai.OpenAI, engine: EngineProcess) -> None:
    ask: dict[str, Any] = {"model": MODEL_NAME, "prompt": COUNT, "temperature": 0, "max_tokens": 20}
    whole = engine.complete(**ask)
    chunks = list(official.completions.create(**ask, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole["choices"][0]["text"]
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "length"]
    assert all(chunk.object == "text_completion" and chunk.usage is None for chunk in chunks)


def test_the_real_tokenizer_streams_what_it_decodes(engine: EngineProcess) -> None:
    """Where most characters are several tokens."""
    ask = {
        "prompt": "東京は日本の首都です。東京は日本の首都です。東京は日",
        "temperature": 0.4,
        "seed": 1,
        "max_tokens": 30,
    }
    whole = engine.complete(**ask)["choices"][0]["text"]
    with engine.client.stream("POST", "/v1/completions", json={**ask, "stream": True}) as response:
        events = [parse_event(line) for line in response.iter_lines() if line]
    assert events.pop() is None
    assert "".join(event["choices"][0]["text"] for event in events) == whole
    assert sum(len(character.encode()) > 1 for character in whole) > 10


def test_a_stop_sequence_ends_an_answer(official: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL_NAME, "prompt": COUNT, "temperature": 0, "max_tokens": 30, "stop": " 7, 8"}
    whole = official.completions.create(**ask)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (" 4, 5, 6,", "stop")
    chunks = list(official.completions.create(**ask, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == " 4, 5, 6,"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.completion_tokens < 20


def test_a_chat_stops_too(engine: EngineProcess) -> None:
    answer = engine.chat(stop=["of Fr"])
    assert answer["choices"][0]["message"]["content"] == "The capital "
    assert answer["usage"]["completion_tokens"] == len(answer["kvtier"]["token_ids"]) == 4


def test_streams_in_parallel(engine: EngineProcess) -> None:
    prompts = [f"{COUNT} {i}," for i in range(6)]

    def stream(prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "stream": True}
        with engine.client.stream("POST", "/v1/completions", json=body) as response:
            events = [parse_event(line) for line in response.iter_lines() if line]
        return "".join(event["choices"][0]["text"] for event in events[:-1])

    with ThreadPoolExecutor(6) as threads:
        together = list(threads.map(stream, prompts))
    assert together == [engine.complete(prompt=p, max_tokens=12)["choices"][0]["text"] for p in prompts]


def test_a_reader_that_goes_away_ends_its_request(engine: EngineProcess) -> None:
    cancelled = 'kvtier_engine_requests_total{reason="cancelled"}'
    before = engine.metric(cancelled)
    body = {"prompt": COUNT, "max_tokens": 1200, "temperature": 0, "stream": True}
    with engine.client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    until(lambda: engine.metric(cancelled) == before + 1)
    engine.chat(max_tokens=1)


def test_errors_are_openai_s(official: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL_NAME, "prompt": "a", "max_tokens": 1}
    with pytest.raises(openai.NotFoundError) as unknown:
        official.completions.create(**ask | {"model": "gpt-4"}, stream=True)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="1 prompt tokens and max_tokens 100000") as too_long:
        official.completions.create(**ask | {"max_tokens": 100_000}, stream=True)
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError, match="less than or equal to 5") as unsupported:
        official.completions.create(**ask, logprobs=6)
    assert unsupported.value.param == "logprobs"
    assert official.models.retrieve(MODEL_NAME).id == official.models.list().data[0].id == MODEL_NAME
    with pytest.raises(openai.NotFoundError):
        official.models.retrieve("gpt-4")


def test_a_reset_over_http(engine: EngineProcess) -> None:
    engine.complete(prompt=COUNT * 5, max_tokens=1)
    assert _cached(engine.complete(prompt=COUNT * 5, max_tokens=1)) > 0
    answer = engine.post("/v1/cache/reset", {})
    assert answer["scope"] == "engine"
    assert answer["forgotten_blocks"]["device"] > 0
    assert _cached(engine.complete(prompt=COUNT * 5, max_tokens=1)) == 0
    assert engine.client.post("/v1/cache/reset").json()["forgotten_blocks"]["device"] > 0, "no body needed"
    refused = engine.client.post("/v1/cache/reset", json={"scope": "shared"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "scope")
    assert engine.client.get("/v1/cache/reset").status_code == 405


def _cached(answer: dict[str, Any]) -> int:
    num_tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return num_tokens
