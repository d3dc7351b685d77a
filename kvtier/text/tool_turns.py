"""Tools and their calls as plain turns, for chat templates that know nothing of tools."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""The system's turn in Qwen2.5's chat template, which has it from Hermes 2 Pro."""


def as_plain_turns(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The conversation with the roles system, user and assistant, and text as content, alone.

    Tools are described in the system's turn; calls are what the assistant said; results of tools come from the user, in
    one turn where several follow each other. As it is if there are none of these.
    """
    turns: list[Mapping[str, Any]] = []
    was_result = False
    for message in messages:
        content, is_result = message["content"], message["role"] == "tool"
        if is_result:
            content = f"<tool_response>\n{content}\n</tool_response>"
            if was_result:
                content = f"{turns.pop()['content']}\n{content}"
            turns.append({"role": "user", "content": content})
        elif message.get("tool_calls"):
            calls = [_call(call["function"]) for call in message["tool_calls"]]
            turns.append({"role": "assistant", "content": "\n".join([content, *calls] if content else calls)})
        else:
            turns.append(message)
        was_result = is_result
    return _with_tools(turns, tools) if tools else turns


def _call(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def _with_tools(turns: list[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    described = _TOOLS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if turns and turns[0]["role"] == "system":
        return [{"role": "system", "content": f"{turns[0]['content']}\n\n{described}"}, *turns[1:]]
    return [{"role": "system", "content": described}, *turns]
