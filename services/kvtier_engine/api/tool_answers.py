"""Calls of tools in OpenAI's format."""

import uuid
from collections.abc import Iterable
from typing import Any

from kvtier.text.tool_calls import CallPart, CallReader, CallStyle

Json = dict[str, Any]


class ToolAnswer:
    """One answer of a model that was told of tools: what of its text is content, and what calls."""

    def __init__(self, style: CallStyle, most_calls: int | None) -> None:
        self._reader = CallReader(style, most_calls)

    @property
    def has_calls(self) -> bool:
        """Whether any has been told."""
        return self._reader.num_calls > 0

    def deltas(self, text: str, *, is_last: bool) -> list[Json]:
        """What the next piece of text adds to a stream."""
        parts = self._reader.feed(text) + (self._reader.finish() if is_last else [])
        return [{"content": part} if isinstance(part, str) else {"tool_calls": [_delta(part)]} for part in parts]

    def message(self, text: str) -> Json:
        """The whole answer."""
        parts = self._reader.feed(text) + self._reader.finish()
        content = "".join(part for part in parts if isinstance(part, str))
        calls = _whole(part for part in parts if isinstance(part, CallPart))
        return {"content": content or None, "tool_calls": calls} if calls else {"content": content}


def _delta(part: CallPart) -> Json:
    if part.name is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    return {"index": part.index, **_call(part.name, part.arguments)}


def _whole(parts: Iterable[CallPart]) -> list[Json]:
    calls: list[Json] = []
    for part in parts:
        if part.name is not None:
            calls.append(_call(part.name, part.arguments))
        else:
            calls[part.index]["function"]["arguments"] += part.arguments
    return calls


def _call(name: str, arguments: str) -> Json:
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": {"name": name, "arguments": arguments}}
