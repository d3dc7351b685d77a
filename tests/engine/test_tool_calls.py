"""What models write of tools: parsed whatever the pieces, held by grammars, and told in chat templates."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kvtier.errors import InvalidInputError
from kvtier.text.chat_template import ChatTemplate
from kvtier.text.tool_calls import HERMES, LLAMA, CallReader, CallStyle
from kvtier_engine.text.answer_grammar import HeldCalls, grammar_of_answers
from kvtier_engine.text.grammars import Grammars

Parsed = tuple[str, list[tuple[str, str]]]


def parsed(style: CallStyle, pieces: Sequence[str], most_calls: int | None = None) -> Parsed:
    reader = CallReader(style, most_calls)
    parts = [part for piece in pieces for part in reader.feed(piece)] + reader.finish()
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, str):
            continue
        if part.name is not None:
            assert part.index == len(calls)
            calls.append((part.name, part.arguments))
        else:
            calls[part.index] = (calls[part.index][0], calls[part.index][1] + part.arguments)
    assert reader.num_calls == len(calls)
    return "".join(part for part in parts if isinstance(part, str)), calls


F, G = '{"name": "f", "arguments": {"a": "}</tool_call>\\""}}', '{"arguments": {"b": [1, {}]}, "name": "g"}'
F_CALLED, G_CALLED = ("f", '{"a": "}</tool_call>\\""}'), ("g", '{"b": [1, {}]}')
LIST = f'[{F}, {{"name": "h", "arguments": "{{}}"}}]'
EXAMPLES: list[tuple[CallStyle, str, Parsed]] = [
    (HERMES, f"Let me see.\n\n<tool_call>\n{F}\n</tool_call>\n", ("Let me see.", [F_CALLED])),
    (HERMES, f"<tool_call>{F}</tool_call>\n<tool_call>\n{G}\n</tool_call>", ("", [F_CALLED, G_CALLED])),
    (HERMES, f"<tool_call>{LIST}</tool_call> and more ", (" and more"[1:], [F_CALLED, ("h", "{}")])),
    (HERMES, f"<tool_call>{F[:30]}", ("", [("f", F[27:30])])),
    (HERMES, "no <tool_call> at all </tool_call> ", ("no <tool_call> at all </tool_call> ", [])),
    (HERMES, 'a <tool_call>{"city": "Paris"}</tool_call>', ('a <tool_call>{"city": "Paris"}</tool_call>', [])),
    (HERMES, F, (F, [])),
    (LLAMA, f'{F}; {{"name": "g", "parameters": {{}}}}', ("", [F_CALLED, ("g", "{}")])),
    (LLAMA, f"\n{G}", ("", [G_CALLED])),
    (LLAMA, f"It is {F}", (f"It is {F}", [])),
    (LLAMA, '{"city": "Paris"}', ('{"city": "Paris"}', [])),
]


@pytest.mark.parametrize(("style", "text", "expected"), EXAMPLES, ids=lambda value: None)
def test_calls_and_content_are_told_apart(style: CallStyle, text: str, expected: Parsed) -> None:
    assert parsed(style, [text]) == parsed(style, list(text)) == expected
    assert parsed(style, list(text), most_calls=1)[1] == expected[1][:1]


PIECES = ["<tool_call>", "</tool_call>", "<tool", "\n", " ", F, G, LIST, F[:27], '"', "{", "}", "; ", "\\", "words"]


@given(st.sampled_from([HERMES, LLAMA]), st.lists(st.sampled_from(PIECES), max_size=8), st.lists(st.integers(0, 200)))
@example(HERMES, ["words", " ", "<tool_call>", "<tool_call>", F], [])
def test_pieces_do_not_matter(style: CallStyle, pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)
    places = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    cut = [text[a:b] for a, b in itertools.pairwise(places)]
    assert parsed(style, cut) == parsed(style, list(text)) == parsed(style, [text])
    if '"name"' not in text:
        assert parsed(style, cut) == (text, [])


CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
CALL = '{"name": "f", "arguments": {"city": "Paris"}}'
IN_HERMES, IN_LLAMA = f"<tool_call>\n{CALL}\n</tool_call>", CALL.replace("arguments", "parameters")


@pytest.mark.parametrize(
    ("style", "required", "schema", "fits", "does_not"),
    [
        (HERMES, True, None, [IN_HERMES, f"{IN_HERMES}\n{IN_HERMES}"], ["", "Hello", IN_HERMES.replace("Paris", "x")]),
        (HERMES, False, None, ["", "Hello", f"Hello {IN_HERMES} ..."], [f"Hello {IN_HERMES.replace('Paris', 'x')}"]),
        (HERMES, False, CITY, ['{"city": "Paris"}', IN_HERMES], ["Hello", f"Hello {IN_HERMES}"]),
        (LLAMA, True, None, [IN_LLAMA, f"{IN_LLAMA}; {IN_LLAMA}"], ["", CALL]),
        (LLAMA, False, None, ["", "Hello {", IN_LLAMA], ["{}", IN_LLAMA.replace("Paris", "x")]),
    ],
)  # fmt: skip
def test_answers_that_are_held_to_calls(
    style: CallStyle, required: bool, schema: dict[str, Any] | None, fits: list[str], does_not: list[str]
) -> None:
    tokenizer = _byte_tokenizer()
    grammars = Grammars(tokenizer.to_str(), tokenizer.get_vocab_size(), (0,))
    for parallel in (True, False):
        calls = HeldCalls(style=style, parameters={"f": CITY}, required=required, parallel=parallel)
        grammar = grammar_of_answers(schema, calls)
        for text in fits:
            is_fit = parallel or text.count('"name"') < 2
            assert _is_answer(grammars, grammar, tokenizer.encode(text).ids) == is_fit, (parallel, text)
            if text.startswith(("{", "<")) and required:
                assert parsed(style, [text])[1] == [("f", '{"city": "Paris"}')] * text.count('"name"')
        assert not any(_is_answer(grammars, grammar, tokenizer.encode(text).ids) for text in does_not)


def _is_answer(grammars: Grammars, grammar: str, token_ids: list[int]) -> bool:
    answer = grammars.compile(grammar)
    for token_id in token_ids:
        if not answer.allowed()[token_id]:
            return False
        answer.accept(token_id)
    return bool(answer.allowed()[0])


def _byte_tokenizer() -> Tokenizer:
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={"<|end|>": 0} | {c: 1 + i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


QWEN = """{%- if tools %}{{ '<tools>' }}{%- for tool in tools %}
{{ tool | tojson }}{%- endfor %}{{ '</tools>' }}{% endif %}
{%- for message in messages %}{{ message.role + ': ' + message.content }}
{%- for call in message.tool_calls or [] %}
{{ '<tool_call>' + call.function.name + (call.function.arguments | tojson) }}{% endfor %}
{%- endfor %}"""
TOOL = {"type": "function", "function": {"name": "f", "description": "a < b & é", "parameters": CITY}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"city": "Paris"}}}],
    },
    {"role": "tool", "content": "14", "tool_call_id": "1"},
    {"role": "tool", "content": "15", "tool_call_id": "1"},
]


def test_templates_get_tools_as_in_transformers(tmp_path: Path) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    for tools in ([TOOL], None):
        (expected,), _ = render_jinja_template(
            [CONVERSATION], tools=tools, chat_template=QWEN, add_generation_prompt=True
        )
        template = ChatTemplate(tmp_path, {"chat_template": QWEN})
        assert template.render(CONVERSATION, tools) == expected
        assert template.call_style == HERMES


def test_models_with_a_template_for_tools_use_it(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools }} ipython"}]
    template = ChatTemplate(tmp_path, {"chat_template": named})
    assert (template.render(CONVERSATION, None), template.render(CONVERSATION, [TOOL])[:2]) == ("plain", "[{")
    assert template.call_style == LLAMA
    assert ChatTemplate(tmp_path, {"chat_template": "{{ tools }}"}).call_style is None


def test_templates_without_tools_get_plain_turns(tmp_path: Path) -> None:
    plain = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    template = ChatTemplate(tmp_path, {"chat_template": plain})
    text = template.render([{"role": "system", "content": "Be brief."}, *CONVERSATION], [TOOL])
    assert text.startswith("[system] Be brief.\n\n# Tools\n")
    assert json.dumps(TOOL, ensure_ascii=False) in text
    said = '[user] Hi\n[assistant] <tool_call>\n{"name": "f", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    results = [f"<tool_response>\n{result}\n</tool_response>\n" for result in (14, 15)]
    assert text.endswith(f"{said}[user] {''.join(results)}")
    assert template.render(CONVERSATION[:1], None) == "[user] Hi\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("plain", {}),
        ("plain", {"content": "a"}),
        *(("plain", {"role": "assistant", "content": "a", "tool_calls": calls}) for calls in (5, [5], [{}])),
        ("plain", {"role": "assistant", "content": "a", "tool_calls": [{"function": {}}]}),
        ("{{ tools }}{{ messages[0].tool_calls | dictsort }}", {"tool_calls": 5}),
        ("{{ tools }}{{ 'a'.center(messages[0].content) }}", {"content": 10**30}),
    ],
)
def test_messages_that_a_template_cannot_take_are_refused(tmp_path: Path, source: str, message: dict[str, Any]) -> None:
    template = ChatTemplate(tmp_path, {"chat_template": source})
    with pytest.raises(InvalidInputError):
        template.render([message], None)
