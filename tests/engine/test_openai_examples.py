"""The examples of OpenAI's documentation, run by their client against an engine that is served as users serve it."""

import json
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from engine_process import MODEL_NAME, EngineProcess

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get current temperature for a given location.",
        "parameters": {
            "type": "object",
            "properties": {
                "location": {"type": "string", "enum": ["Paris, France", "Bogotá, Colombia"]},
                "units": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["location", "units"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
TIME: Any = {"type": "function", "function": {"name": "get_time"}}
ASK: Any = {"role": "user", "content": "What is the weather like in Paris today?"}


def test_a_chat_with_a_developer(official: openai.OpenAI) -> None:
    completion = official.chat.completions.create(
        model=MODEL_NAME,
        messages=[
            {"role": "developer", "content": "You are a helpful assistant."},
            {"role": "user", "content": "Hello!"},
        ],
        max_completion_tokens=8,
        temperature=0,
    )
    assert completion.choices[0].message.role == "assistant"
    assert completion.choices[0].message.tool_calls is None
    stream = official.chat.completions.create(
        model=MODEL_NAME, messages=[ASK], max_completion_tokens=8, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def test_completions_of_several_prompts(official: openai.OpenAI, engine: EngineProcess) -> None:
    prompts = ["Say this is a test", "The sea is", "The sea is"]
    ask: Any = {"model": MODEL_NAME, "max_tokens": 7, "temperature": 0}
    alone = [official.completions.create(**ask, prompt=prompt) for prompt in prompts]
    together = official.completions.create(**ask, prompt=prompts, n=2)
    texts = [answer.choices[0].text for answer in alone for _ in range(2)]
    assert [choice.text for choice in together.choices] == texts
    assert [choice.index for choice in together.choices] == list(range(6))
    assert together.usage is not None
    assert together.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone if answer.usage)
    assert together.usage.completion_tokens == 6 * 7
    streamed = [""] * 6
    for chunk in official.completions.create(
        **ask, prompt=prompts, n=2, stream=True, stream_options={"include_usage": True}
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts
    assert chunk.usage is not None
    assert chunk.usage.completion_tokens == together.usage.completion_tokens
    whole = engine.complete(prompt=["a", "The sea is"], max_tokens=1, return_prompt_token_ids=True)["kvtier"]
    ids = whole["prompt_token_ids_by_choice"]
    assert whole["prompt_token_ids"] == ids[0]
    of_ids = official.completions.create(**ask, prompt=ids, best_of=2, seed=1)
    assert [choice.text for choice in of_ids.choices] == [
        official.completions.create(**ask, prompt="a").choices[0].text,
        texts[2],
    ]
    with pytest.raises(openai.BadRequestError, match="more than the"):
        official.completions.create(**ask, prompt=["a", "a " * 2000])


def test_a_tool_is_called_and_its_result_is_used(official: openai.OpenAI) -> None:
    messages: list[Any] = [ASK]
    first = official.chat.completions.create(
        model=MODEL_NAME,
        messages=messages,
        tools=[WEATHER, TIME],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
    )
    choice = first.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name in ("get_weather", "get_time")
    assert set(json.loads(call.function.arguments)) in ({"location", "units"}, set())
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "14"}]
    second = official.chat.completions.create(
        model=MODEL_NAME, messages=messages, tools=[WEATHER, TIME], max_tokens=8, temperature=0
    )
    assert second.choices[0].message.content or second.choices[0].message.tool_calls
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= first.usage.prompt_tokens


def test_a_named_tool_streams_the_arguments_that_it_has_whole(official: openai.OpenAI) -> None:
    ask: Any = {"model": MODEL_NAME, "messages": [ASK], "tools": [WEATHER, TIME], "temperature": 0}
    ask["tool_choice"] = {"type": "function", "function": {"name": "get_weather"}}
    whole = official.chat.completions.create(**ask).choices[0]
    assert whole.message.tool_calls is not None
    assert whole.message.tool_calls[0].type == "function"
    chunks = [chunk.choices[0] for chunk in official.chat.completions.create(**ask, stream=True)]
    parts = [call for choice in chunks for call in choice.delta.tool_calls or []]
    assert [part.id is not None for part in parts] == [True] + [False] * (len(parts) - 1)
    assert len(parts) >= 2
    assert parts[0].function is not None
    assert parts[0].function.name == "get_weather"
    arguments = "".join(part.function.arguments or "" for part in parts if part.function)
    assert arguments == whole.message.tool_calls[0].function.arguments
    assert set(json.loads(arguments)) == {"location", "units"}
    assert chunks[-1].finish_reason == whole.finish_reason == "tool_calls"
    assert not any(choice.delta.content for choice in chunks)


class GetWeather(BaseModel):
    city: Literal["Paris", "Bogotá"]
    days: Annotated[int, Field(ge=1, le=3)]


class Step(BaseModel):
    explanation: Literal["add", "subtract"]
    output: Annotated[int, Field(ge=0, le=99)]


class MathReasoning(BaseModel):
    steps: Annotated[list[Step], Field(max_length=1)]
    final_answer: Annotated[int, Field(ge=0, le=99)]


class Verdict(BaseModel):
    right: bool


def test_structured_outputs(official: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "system", "content": "You are a helpful math tutor."},
        {"role": "user", "content": "how can I solve 8x + 7 = -23"},
    ]
    parsed = official.chat.completions.parse(model=MODEL_NAME, messages=messages, response_format=MathReasoning)
    assert isinstance(parsed.choices[0].message.parsed, MathReasoning)
    again = official.chat.completions.parse(
        model=MODEL_NAME,
        messages=[*messages, parsed.choices[0].message, {"role": "user", "content": "Check that."}],  # type: ignore[list-item]
        response_format=Verdict,
    )
    assert isinstance(again.choices[0].message.parsed, Verdict)
    tool = openai.pydantic_function_tool(GetWeather)
    ask: Any = {"model": MODEL_NAME, "messages": [ASK], "tools": [tool], "tool_choice": "required"}
    called = official.chat.completions.parse(**ask, parallel_tool_calls=False)
    calls = called.choices[0].message.tool_calls
    assert calls
    assert all(isinstance(call.function.parsed_arguments, GetWeather) for call in calls)
    with official.chat.completions.stream(**ask, parallel_tool_calls=False) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert final.choices[0].message.tool_calls
    assert isinstance(final.choices[0].message.tool_calls[0].function.parsed_arguments, GetWeather)


def test_tools_that_are_not_called_change_nothing_else(official: openai.OpenAI, engine: EngineProcess) -> None:
    ask: dict[str, Any] = {"messages": [ASK], "max_tokens": 12, "return_prompt_token_ids": True}
    plain, none = engine.chat(**ask), engine.chat(**ask, tools=[WEATHER], tool_choice="none")
    assert none["kvtier"] == plain["kvtier"] | {"ttft_s": none["kvtier"]["ttft_s"]}
    told = engine.chat(**ask, tools=[WEATHER])
    assert len(told["kvtier"]["prompt_token_ids"]) > len(plain["kvtier"]["prompt_token_ids"]) + 100
    with official.chat.completions.with_streaming_response.create(
        model=MODEL_NAME, messages=[ASK], tools=[TIME], max_tokens=12, temperature=0, logprobs=True, stream=True
    ) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    entries = [each for e in events for c in e["choices"] if c["logprobs"] for each in c["logprobs"]["content"]]
    text = "".join(c["delta"].get("content") or "" for e in events for c in e["choices"])
    assert "".join(entry["token"] for entry in entries) == text != ""


TOOL = {"type": "function", "function": {"name": "f"}}
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "no function": ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
    "name": ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
    "twice": ({"tools": [TOOL, TOOL]}, "tools", "a name of its own"),
    "no tools": ({"tool_choice": "required"}, "tool_choice", "only with tools"),
    "other choice": ({"tools": [TOOL], "tool_choice": "f"}, "tool_choice", 'must be "none", "auto"'),
    "other tool": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "no tool 'g'"
    ),
    "no schema": (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "foo"}}}]},
        "tools", "Invalid type: foo",
    ),
    "beams": ({"tools": [TOOL], "use_beam_search": True, "n": 2}, "tools", "not with use_beam_search"),
    "result of nothing": ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0]", "tool_call_id is needed"),
    "nothing said": ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content", "valid string"),
    "torn arguments": (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{"}}]}]},
        "messages[0].tool_calls[0].function.arguments", "a JSON object",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("body", "param", "words"), BAD.values(), ids=BAD.keys())
def test_bad_tools_get_openai_errors(engine: EngineProcess, body: dict[str, Any], param: str, words: str) -> None:
    response = engine.client.post("/v1/chat/completions", json={"messages": [ASK], **body})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert words in response.json()["error"]["message"]
