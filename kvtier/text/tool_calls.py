"""Calls of tools in what a model writes: found as text comes, and their arguments told as they come.

Two families of models are known. Hermes, Qwen and SmolLM write each call as `<tool_call>{"name": ..., "arguments":
...}</tool_call>`, anywhere in the text. Llama 3 writes `{"name": ..., "parameters": ...}` and nothing else.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
"""What most calls begin with. Others are told when they are whole."""
_BRACES = re.compile(r"[\s}]*")


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How a family of models writes calls."""

    begin: str
    """What stands before each call. Empty: an answer that begins with a brace is calls."""
    end: str
    separator: str
    """What stands between calls."""
    arguments: str
    """The key of the arguments, beside `name`."""


HERMES = CallStyle(begin="<tool_call>", end="</tool_call>", separator="\n", arguments="arguments")
LLAMA = CallStyle(begin="", end="", separator="; ", arguments="parameters")


@dataclass(frozen=True, slots=True)
class CallPart:
    """A part of a call."""

    index: int
    """The place of the call among those of the answer."""
    name: str | None
    """The function's name with the first part of a call, None with others."""
    arguments: str
    """The next piece of the arguments. Together the pieces are JSON, unless the answer ends within them."""


class CallReader:
    """Parts text into content and calls. For one thread at a time.

    Whitespace around calls is no content. What looks like a call and is none is content, as it was written. However the
    text is cut into pieces, contents and calls are together the same.
    """

    def __init__(self, style: CallStyle, most_calls: int | None = None) -> None:
        """:param most_calls: what follows so many calls is left out; None: no bound."""
        self._style, self._most_calls = style, most_calls
        self._state: Callable[[], bool] = self._next
        """Takes what it can from `_rest`; False when it needs more text."""
        self._rest = ""
        """Text that is not told yet."""
        self._is_whole = False
        """Whether no more text comes."""
        self._json, self._num_scanned = _JsonEnd(), 0
        """The end of the present call's JSON, and how many characters of `_rest` it has seen."""
        self._opening = ""
        """What stands before the JSON of the present call: whitespace and the style's beginning."""
        self._is_behind_call = False
        """Nothing but whitespace has come since the last call."""
        self._parts: list[str | CallPart] = []
        self.num_calls = 0

    def feed(self, text: str) -> list[str | CallPart]:
        """What is certain now: pieces of content, and parts of calls."""
        self._rest += text
        return self._read()

    def finish(self) -> list[str | CallPart]:
        """What is left, when no more text comes."""
        self._is_whole = True
        return self._read()

    def _read(self) -> list[str | CallPart]:
        while (self._rest or (self._is_whole and self._state == self._read_call)) and self._state():
            pass
        parts, self._parts = self._parts, []
        return parts

    def _next(self) -> bool:
        """Reads on where a call may begin."""
        if self._most_calls is not None and self.num_calls >= self._most_calls:
            self._rest = ""
        elif self._style.begin:
            return self._read_content()
        else:
            stripped = self._rest.lstrip()
            if not stripped and not self._is_whole:
                return False
            self._state = self._read_plain
            if stripped.startswith("{"):
                self._begin_call()
        return True

    def _read_content(self) -> bool:
        begin = self._rest.find(self._style.begin)
        if begin >= 0:
            text = self._rest[:begin].rstrip()
            self._say(text)
            self._opening = self._rest[len(text) : begin + len(self._style.begin)]
            self._rest = self._rest[begin + len(self._style.begin) :]
            self._begin_call()
            return True
        is_last = self._is_whole and not self.num_calls
        text = self._rest if is_last else self._rest[: self._num_certain()].rstrip()
        self._say(text)
        self._rest = "" if self._is_whole else self._rest[len(text) :]
        return False

    def _num_certain(self) -> int:
        """How many characters of the rest cannot be the beginning of a call."""
        longest = 0 if self._is_whole else min(len(self._rest), len(self._style.begin) - 1)
        held = next((n for n in range(longest, 0, -1) if self._rest.endswith(self._style.begin[:n])), 0)
        return len(self._rest) - held

    def _say(self, text: str) -> None:
        if self._is_behind_call:
            text = text.lstrip()
        if text:
            self._parts.append(text)
            self._is_behind_call = False

    def _begin_call(self) -> None:
        self._json, self._num_scanned = _JsonEnd(), 0
        self._state = self._read_call

    def _read_call(self) -> bool:
        """Up to the arguments, or the whole call if it is written in another way."""
        head = _HEAD.match(self._rest)
        if head is not None:
            self._tell(json.loads(head[1], strict=False), "")
            self._rest, self._json, self._state = self._rest[head.end() :], _JsonEnd(), self._read_arguments
            return True
        end = self._json.feed(self._rest[self._num_scanned :])
        if end is None and not self._is_whole:
            self._num_scanned = len(self._rest)
            return False
        end = 0 if end is None else self._num_scanned + end
        calls = _calls_of(self._rest[:end])
        for name, arguments in calls[: None if self._most_calls is None else self._most_calls - self.num_calls]:
            self._tell(name, arguments)
        if calls:
            self._rest, self._state = self._rest[end:], self._read_end
        else:
            self._say(self._opening)
            self._state = self._next if self._style.begin else self._read_plain
        return True

    def _read_arguments(self) -> bool:
        end = self._json.feed(self._rest)
        self._parts.append(CallPart(self.num_calls - 1, None, self._rest[:end]))
        self._rest = "" if end is None else self._rest[end:]
        self._state = self._read_arguments if end is None else self._read_end
        return end is not None

    def _read_end(self) -> bool:
        """Braces, and the end of the call or what separates it from the next; whatever else comes is content."""
        braces = _BRACES.match(self._rest)
        self._rest = self._rest[braces.end() if braces else 0 :]
        end = self._style.end or self._style.separator.strip()
        if not self._is_whole and end.startswith(self._rest) and end != self._rest:
            return False
        self._rest, self._state = self._rest.removeprefix(end), self._next
        return True

    def _read_plain(self) -> bool:
        self._say(self._rest)
        self._rest = ""
        return False

    def _tell(self, name: str, arguments: str) -> None:
        self._parts.append(CallPart(self.num_calls, name, arguments))
        self.num_calls += 1
        self._is_behind_call = True


class _JsonEnd:
    """Finds where a JSON object or array ends, piece by piece."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_text = self._is_escaped = False

    def feed(self, text: str) -> int | None:
        """The number of characters up to the end; 0 if it is neither object nor array; None: it goes on."""
        for index, character in enumerate(text):
            if self._in_text:
                self._in_text = self._is_escaped or character != '"'
                self._is_escaped = character == "\\" and not self._is_escaped
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return index + 1
            elif self._depth == 0 and not character.isspace():
                return 0
            elif character == '"':
                self._in_text = True
        return None


def _calls_of(text: str) -> list[tuple[str, str]]:
    """Names and arguments of the calls that `text` is as a whole; none if it is something else."""
    try:
        value: Any = json.loads(text, strict=False)
    except ValueError:
        return []
    calls = [_call_of(call) for call in (value if isinstance(value, list) else [value])]
    return [call for call in calls if call is not None] if all(calls) else []


def _call_of(value: Any) -> tuple[str, str] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        return value["name"], arguments
    return (value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
