"""What an answer may be, as a grammar in llguidance's dialect of Lark: JSON that fits a schema, or calls of tools."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier.text.tool_calls import CallStyle

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""The schema of `json_object`."""
_ONE_SPELLING = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
"""Whitespace that a model may add would be as long as it likes. Arguments of calls are spelt as chat templates spell
those of earlier calls, so that their KV is found again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldCalls:
    """Calls that an answer is held to."""

    style: CallStyle
    parameters: Mapping[str, Mapping[str, Any]]
    """The JSON schema of the arguments of each tool that may be called, by its name. At least one."""
    required: bool
    """Whether the answer is calls and nothing else. False: it may be something else as well."""
    parallel: bool
    """Whether there may be several."""


def grammar_of_answers(schema: Mapping[str, Any] | None, calls: HeldCalls | None) -> str:
    """The grammar of answers.

    :param schema: of answers that are no calls; None: they are any text.
    :param calls: None: there are none.
    """
    rules = ["%llguidance {}", "TEXT: /(.|\\n)*/" if schema is None else f"text: %json {_json(schema)}"]
    if calls is None:
        return "\n".join([*rules, f"start: {'TEXT' if schema is None else 'text'}", ""])
    style, newline = calls.style, "\n" if calls.style.begin else ""
    begin, end = _text(style.begin + newline), _text(newline + style.end)
    more = f"({_text(style.separator)} call)*" if calls.parallel else ""
    rules += [f"calls: call {more}", f"call: {begin} function {end}", *_functions(calls)]
    if calls.required:
        rules += ["start: calls"]
    elif schema is not None:
        rules += ["start: calls | text"]
    elif style.begin:
        rules += [f"head[lazy]: TEXT {_text(style.begin)}", f"later: head {_text(newline)} function {end}"]
        rules += ["start: later* TEXT" if calls.parallel else "start: later TEXT | TEXT"]
    else:  # an answer that begins with a brace is calls
        rules += ["start: calls | NO_CALL?", "NO_CALL: /[^{ \\t\\r\\n](.|\\n)*/"]
    return "\n".join([*rules, ""])


def _functions(calls: HeldCalls) -> list[str]:
    """Rules of the JSON of a call."""
    rules = [f"function: {' | '.join(f'tool_{index}' for index in range(len(calls.parameters)))}"]
    for index, (name, schema) in enumerate(calls.parameters.items()):
        head = f'{{"name": {json.dumps(name)}, "{calls.style.arguments}": '
        rules += [f"tool_{index}: {_text(head)} arguments_{index} {_text('}')}"]
        rules += [f"arguments_{index}: %json {_json(schema)}"]
    return rules


def _json(schema: Mapping[str, Any]) -> str:
    """A schema for the grammar. What fits it is spelt in one way only, unless it is `ANY_OBJECT`."""
    return json.dumps(schema if schema is ANY_OBJECT else {**_ONE_SPELLING, **schema})


def _text(text: str) -> str:
    return json.dumps(text) if text else ""
