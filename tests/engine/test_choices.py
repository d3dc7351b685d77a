"""Several answers to one prompt over HTTP, and log probabilities in OpenAI's shapes. A tiny model."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from engine_http_rig import PacedModel, ServedEngine, served_engine
from engine_process import official_client, until
from kvtier_engine.scheduling.beam_search import BeamSettings
from kvtier_engine.scheduling.sampling_params import Sampling
from naive_answers import naive_answer, naive_beams
from tiny_model import prompt

TOKENS = prompt(13)
ASK: dict[str, Any] = {"prompt": TOKENS, "max_tokens": 12, "temperature": 1.2, "seed": 5}


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[ServedEngine]:
    with served_engine(tmp_path) as served:
        yield served
    served.rig.close()


@pytest.fixture
def official(tiny: ServedEngine) -> Iterator[openai.OpenAI]:
    with official_client(str(tiny.client.base_url)) as client:
        yield client


def naive(branch: int) -> tuple[list[int], list[float]]:
    tokens, logprobs = naive_answer(TOKENS, Sampling(max_tokens=12, temperature=1.2, seed=5), branch)
    return list(tokens), logprobs


def test_choices_whole_and_streamed(tiny: ServedEngine) -> None:
    whole = tiny.complete(**ASK, n=3)
    expected = [tiny.tokenizer.decode(naive(index)[0]) for index in range(3)]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in whole["choices"]] == expected
    assert whole["kvtier"]["token_ids_by_choice"] == [naive(index)[0] for index in range(3)]
    assert whole["usage"]["prompt_tokens"] == 13
    assert whole["usage"]["completion_tokens"] == 36
    assert tiny.complete(**ASK)["choices"][0]["text"] == expected[0]
    *events, usage, done = tiny.stream(**ASK, n=3, stream_options={"include_usage": True})
    assert done is None
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 36
    choices = [event["choices"][0] for event in events]
    for index in range(3):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == expected[index]
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["length"]
    assert len({choice["index"] for choice in choices[:6]}) > 1, "they come side by side"


def test_each_choice_stops_by_itself(tiny: ServedEngine) -> None:
    texts = [tiny.tokenizer.decode(naive(index)[0]) for index in range(3)]
    stop = texts[1][4:6]
    cut = [text.partition(stop)[0] for text in texts]
    whole = tiny.complete(**ASK, n=3, stop=stop)
    assert [choice["text"] for choice in whole["choices"]] == cut
    reasons = ["stop" if stop in text else "length" for text in texts]
    assert [choice["finish_reason"] for choice in whole["choices"]] == reasons
    *events, _ = tiny.stream(**ASK, n=3, stop=stop)
    for index in range(3):
        assert "".join(e["choices"][0]["text"] for e in events if e["choices"][0]["index"] == index) == cut[index]


def test_the_best_of_several(tiny: ServedEngine) -> None:
    drawn = [naive(index) for index in range(5)]
    best = sorted(drawn, key=lambda answer: sum(answer[1]) / len(answer[1]), reverse=True)
    whole = tiny.complete(**ASK, n=2, best_of=5)
    assert whole["kvtier"]["token_ids_by_choice"] == [tokens for tokens, _ in best[:2]]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in whole["choices"])
    assert whole["usage"]["completion_tokens"] == 60
    for wrong in ({"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}, {"best_of": 17}, {"best_of": 129}):
        response = tiny.client.post("/v1/completions", json=ASK | wrong)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "best_of")


def test_the_answers_of_a_beam_search(tiny: ServedEngine) -> None:
    ask = {"prompt": TOKENS, "max_tokens": 8, "use_beam_search": True, "n": 2, "best_of": 4, "length_penalty": 0.5}
    settings = BeamSettings(width=4, length_penalty=0.5)
    found = naive_beams(TOKENS, Sampling(max_tokens=8, num_branches=4, beams=settings))
    whole = tiny.complete(**ask)
    assert whole["kvtier"]["token_ids_by_choice"] == [list(tokens) for tokens in found[:2]]
    stop = whole["choices"][1]["text"][3:5]
    cut = tiny.complete(**ask, stop=stop)["choices"][1]
    assert (cut["text"], cut["finish_reason"]) == (whole["choices"][1]["text"].partition(stop)[0], "stop")
    for param, wrong in {
        "n": {"n": 1, "best_of": 1}, "temperature": {"temperature": 1}, "top_p": {"top_p": 0.5},
        "logprobs": {"logprobs": 1},
        "stream": {"stream": True, "n": 4},
        "length_penalty": {"use_beam_search": False}, "best_of": {"best_of": 17},
    }.items():  # fmt: skip
        response = tiny.client.post("/v1/completions", json=ask | wrong)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_what_only_an_operator_can_change_is_logged_once_and_told_to_no_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "abc{% if tools %}def{% endif %}"}')
    monkeypatch.setitem(sys.modules, "llguidance", None)
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    tool = {"type": "function", "function": {"name": "look"}}
    asks: list[tuple[str, dict[str, Any], str]] = [
        ("completions", {"prompt": [1], "n": 17}, "ask for fewer"),
        ("completions", {"prompt": [1], "best_of": 18}, "ask for fewer"),
        ("completions", {"prompt": [1], "max_tokens": 501}, "lower max_tokens"),
        ("chat/completions", {**chat, "response_format": {"type": "json_object"}}, "leave out response_format"),
        ("chat/completions", {**chat, "tools": [tool]}, "leave them out"),
    ]
    with served_engine(tmp_path) as served:
        for path, body, words in [*asks, *asks]:
            response = served.client.post(f"/v1/{path}", json=body)
            message = response.json()["error"]["message"]
            assert response.status_code == 400
            assert words in message
            assert not any(word in message for word in ("engine.", "pip", "llguidance", "raise", "serve a model"))
    served.rig.close()
    told = [record.args[0] for record in caplog.records if record.name == "kvtier_engine.api.remedies" and record.args]
    assert len(told) == len(set(told)) == 4
    for remedy in ("engine.max_running", "engine.kv_bytes", "pip install '.[json]'", "<tool_call>"):
        assert any(remedy in line for line in told), remedy


def test_log_probabilities_of_completions(official: openai.OpenAI, tiny: ServedEngine) -> None:
    tokens, expected = naive(0)
    choice = official.completions.create(model="tiny", **ASK, logprobs=2).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == pytest.approx(expected, abs=1e-5)
    names = choice.logprobs.tokens
    assert names is not None
    spelled = [tiny.tokenizer.token_bytes(token_id) for token_id in tokens]
    assert names == [chr(each[0]) if each[0] < 128 else f"bytes:\\x{each[0]:02x}" for each in spelled]
    for name, logprob, top in zip(
        names, choice.logprobs.token_logprobs or [], choice.logprobs.top_logprobs or [], strict=True
    ):
        assert top[name] == logprob
        assert 2 <= len(top) <= 3
    offsets = choice.logprobs.text_offset
    assert offsets is not None
    assert offsets == sorted(offsets)
    for name, offset in zip(names, offsets, strict=True):
        assert len(name) > 1 or choice.text[offset] == name
    streamed = [
        chunk.choices[0].logprobs for chunk in official.completions.create(model="tiny", **ASK, logprobs=2, stream=True)
    ]
    told = [each for each in streamed if each is not None]
    assert [name for each in told for name in each.tokens or []] == names
    assert [offset for each in told for offset in each.text_offset or []] == offsets
    alone = official.completions.create(model="tiny", **ASK, logprobs=0).choices[0].logprobs
    assert alone is not None
    assert [list(top) for top in alone.top_logprobs or []] == [[name] for name in names]


def test_a_client_that_goes_away_ends_all_its_answers(tmp_path: Path) -> None:
    model = PacedModel()
    with served_engine(tmp_path, model) as tiny:
        body = ASK | {"n": 3, "max_tokens": 400, "stream": True}
        model.permits.release(4)
        with tiny.client.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
        cancelled = lambda: tiny.rig.counter("engine_requests", reason="cancelled") == 1  # noqa: E731
        until(lambda: cancelled() or (model.num_steps < 300 and model.permits.release()) or False)
        until(lambda: tiny.rig.block_pool.num_free == tiny.rig.block_pool.num_blocks)
    tiny.rig.close()
