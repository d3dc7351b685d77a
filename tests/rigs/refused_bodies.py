"""Requests that an engine refuses: path, body, status, the parameter that the error names, and some of its words."""

from typing import Any

HELLO = [{"role": "user", "content": "hello"}]
BAD_BODIES: dict[str, tuple[str, dict[str, Any], int, str | None, str]] = {
    "no prompt": ("/v1/completions", {}, 400, "prompt", "required"),
    "stream as text": ("/v1/completions", {"prompt": "a", "stream": "yes"}, 400, "stream", "boolean"),
    "options without stream": (
        "/v1/completions", {"prompt": "a", "stream_options": {}}, 400, "stream_options", "only with stream = true"
    ),
    "unknown option": (
        "/v1/completions", {"prompt": "a", "stream": True, "stream_options": {"x": 1}}, 400, "stream_options.x",
        "leave it out",
    ),
    "unknown parameter": ("/v1/completions", {"prompt": "a", "top_k": 5}, 400, "top_k", "leave it out"),
    "unknown and null": ("/v1/completions", {"prompt": "a", "top_k": None}, 400, "top_k", "leave it out"),
    "another endpoint's": ("/v1/completions", {"prompt": "a", "tools": []}, 400, "tools", "leave it out"),
    "log probabilities": ("/v1/completions", {"prompt": "a", "logprobs": 6}, 400, "logprobs", "equal to 5"),
    "bias": ("/v1/completions", {"prompt": "a", "logit_bias": {"5": 101}}, 400, "logit_bias.5", "equal to 100"),
    "bias of text": ("/v1/completions", {"prompt": "a", "logit_bias": {"a": 1}}, 400, "logit_bias.a", "valid integer"),
    "bias of no token": ("/v1/completions", {"prompt": "a", "logit_bias": {"50000": 1}}, 400, "logit_bias", "to 49151"),
    "penalty": (
        "/v1/completions", {"prompt": "a", "frequency_penalty": 2.1}, 400, "frequency_penalty", "or equal to 2"
    ),
    "five stop sequences": ("/v1/completions", {"prompt": "a", "stop": list("abcde")}, 400, "stop", "at most 4 texts"),
    "empty stop sequence": ("/v1/completions", {"prompt": "a", "stop": ["a", ""]}, 400, "stop", "of 1 to 1024"),
    "stop number": ("/v1/completions", {"prompt": "a", "stop": 7}, 400, "stop", "must be text"),
    "many answers": ("/v1/completions", {"prompt": "a", "n": 129}, 400, "n", "less than or equal to 128"),
    "more answers than run": ("/v1/completions", {"prompt": "a", "n": 17}, 400, "n", "up to 16 answers at once"),
    "many answers to many prompts": (
        "/v1/completions", {"prompt": ["a"] * 65, "n": 2}, 400, "prompt", "are 130 answers, but one"
    ),
    "n is true": ("/v1/completions", {"prompt": "a", "n": True}, 400, "n", "valid integer"),
    "best of fewer": ("/v1/completions", {"prompt": "a", "n": 3, "best_of": 2}, 400, "best_of", "at least n"),
    "the best in a stream": (
        "/v1/completions", {"prompt": "a", "best_of": 2, "stream": True}, 400, "best_of", "leave out stream"
    ),
    "top_p 0": ("/v1/completions", {"prompt": "a", "top_p": 0}, 400, "top_p", "greater than 0"),
    "top_p above 1": ("/v1/completions", {"prompt": "a", "top_p": 1.01}, 400, "top_p", "less than or equal to 1"),
    "no tokens wanted": ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "1"),
    "empty prompt": ("/v1/completions", {"prompt": ""}, 400, "prompt", "empty"),
    "foreign token": ("/v1/completions", {"prompt": [3, 10**6]}, 400, "prompt", "49151"),
    "half a token": ("/v1/completions", {"prompt": [1.5]}, 400, "prompt", "must be text or a list of token ids"),
    "too long": ("/v1/completions", {"prompt": "a " * 2000}, 400, "prompt", "shorten the prompt"),
    "too long chat": (
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 2000}]}, 400, "messages",
        "more than the 1456 tokens",
    ),
    "hot": ("/v1/completions", {"prompt": "a", "temperature": 3}, 400, "temperature", "2"),
    "another model": ("/v1/completions", {"prompt": "a", "model": "gpt-4"}, 404, "model", "gpt-4"),
    "seed": ("/v1/completions", {"prompt": "a", "seed": 2**64}, 400, "seed", "9223372036854775807"),
    "text as number": ("/v1/completions", {"prompt": "a", "max_tokens": "5"}, 400, "max_tokens", "valid integer"),
    "truth as number": ("/v1/completions", {"prompt": "a", "max_tokens": True}, 400, "max_tokens", "valid integer"),
    "prompts of two kinds": ("/v1/completions", {"prompt": ["a", [1]]}, 400, "prompt", "a list of 1 to 128 of either"),
    "functions": ("/v1/chat/completions", {"messages": HELLO, "functions": [{}]}, 400, "functions", "[] only"),
    "another format": (
        "/v1/chat/completions", {"messages": HELLO, "response_format": {"type": "xml"}}, 400, "response_format.type",
        '"json_object" or "json_schema"',
    ),
    "no schema": (
        "/v1/chat/completions", {"messages": HELLO, "response_format": {"type": "json_schema"}}, 400,
        "response_format.json_schema", "needed",
    ),
    "a schema that is none": (
        "/v1/chat/completions",
        {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}},
        400, "response_format", "Invalid type: foo",
    ),
    "pictures": (
        "/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400,
        "messages[0].content", "parts of type text only",
    ),
    "audio": ("/v1/chat/completions", {"messages": HELLO, "audio": {}}, 400, "audio", "no value only"),
    "a picture beside text": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
        400, "messages[0].content", "parts of type text only",
    ),
    "likeliest tokens of a chat": (
        "/v1/chat/completions", {"messages": HELLO, "top_logprobs": 2}, 400, "top_logprobs", "only with logprobs = true"
    ),
    "no messages": ("/v1/chat/completions", {"messages": []}, 400, "messages", "at least 1"),
    "unknown role": (
        "/v1/chat/completions", {"messages": [{"role": "x", "content": ""}]}, 400, "messages[0].role",
        '"system", "user", "assistant" or'
    ),
}  # fmt: skip
