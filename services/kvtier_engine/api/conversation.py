"""Messages of a chat, the tools that its answers may call, and which of them they must."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

_MOST_TOOLS = 128
"""OpenAI's."""
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a function that says nothing of its parameters."""


class Only:
    """Accepts the values of a parameter that ask for nothing."""

    def __init__(self, *neutral: Any) -> None:
        self._neutral = neutral

    def __call__(self, value: Any) -> Any:
        if value is None or any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in self._neutral):
            return value
        known = " or ".join(map(json.dumps, self._neutral)) or "no value"
        raise PydanticCustomError("unsupported", "this engine supports {known} only; leave it out", {"known": known})


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class _Function(_Strict):
    """What a tool does."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """The JSON schema of its arguments."""
    strict: bool | None = None
    """Arguments of all calls fit their schemas."""


class Tool(_Strict):
    """Something that the client can do for the model."""

    type: Literal["function"]
    function: _Function

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        return self.function.parameters or _NO_PARAMETERS


class _NamedFunction(_Strict):
    name: FunctionName


class NamedTool(_Strict):
    """The one that an answer must call."""

    type: Literal["function"]
    function: _NamedFunction


Tools = Annotated[list[Tool], Field(max_length=_MOST_TOOLS, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


def _arguments(text: str) -> str:
    try:
        is_object = isinstance(json.loads(text), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise PydanticCustomError("arguments", "arguments of a call must be a JSON object, as text")
    return text


class _CalledFunction(_Strict):
    name: str
    arguments: Annotated[str, AfterValidator(_arguments)]


class ToolCall(_Strict):
    """What the assistant has called."""

    id: str
    type: Literal["function"] = "function"
    function: _CalledFunction


def _as_text(content: Any) -> Any:
    """Parts that are all text as one text, with line breaks between them as in vLLM; what is no list as it is."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.keys() != {"type", "text"} or part["type"] != "text":
            raise PydanticCustomError("parts", "this engine takes parts of type text only, each with its text")
        if not isinstance(part["text"], str):
            raise PydanticCustomError("parts", "the text of a part must be a string")
    return "\n".join(part["text"] for part in content)


def _as_role(role: Any) -> Any:
    """`developer`, which is OpenAI's newer name of it, as `system`."""
    return "system" if role == "developer" else role


class Message(_Strict):
    """One turn."""

    role: Annotated[Literal["system", "user", "assistant", "tool"], BeforeValidator(_as_role)]
    content: Annotated[str, BeforeValidator(_as_text)] = ""
    """Left out, or null, only where the assistant calls tools."""
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: Annotated[Any, AfterValidator(Only(""))] = None
    """OpenAI's client sends this field and the next ones back with an answer's message."""
    annotations: Annotated[Any, AfterValidator(Only([]))] = None
    audio: Annotated[Any, AfterValidator(Only())] = None
    function_call: Annotated[Any, AfterValidator(Only())] = None
    parsed: Any = None
    """Ignored: what the client made of the content."""

    @model_validator(mode="before")
    @classmethod
    def _calls_have_no_content(cls, message: Any) -> Any:
        if isinstance(message, dict) and message.get("content") is None and message.get("tool_calls"):
            return {**message, "content": ""}
        return message

    @model_validator(mode="after")
    def _parts_belong_to_roles(self) -> Self:
        if "content" not in self.model_fields_set:
            raise PydanticCustomError("content", "content is missing")
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("role", 'tool_calls is for role "assistant" only')
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise PydanticCustomError("role", 'tool_call_id is needed with role "tool", and only then')
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it: arguments of calls are objects."""
        kept = {"role", "content", "name", "tool_calls", "tool_call_id"}
        message = self.model_dump(include=kept, exclude_none=True)
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return message


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


def conflict_of_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> tuple[str, str] | None:
    """The parameter that does not go with the other one, and why; None: both do."""
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        return "tools", "each needs a name of its own"
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        return "tool_choice", f"there is no tool {choice.function.name!r} among `tools`"
    return ("tool_choice", "only with tools") if choice == "required" and not tools else None
