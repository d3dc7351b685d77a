"""Conversations as the text that a model was trained to go on with: its chat template, as Hugging Face renders it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import jinja2.sandbox

from kvtier.errors import ConfigError, InvalidInputError
from kvtier.text.tool_calls import HERMES, LLAMA, CallStyle
from kvtier.text.tool_turns import as_plain_turns

_DEFAULT, _WITH_TOOLS = "default", "tool_use"
"""Names of templates where a model has several, as in transformers."""


class ChatTemplate:
    """The chat template of a model folder, or what stands in for it. Immutable after construction; any thread."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        """
        :param config: the contents of tokenizer_config.json.
        :raises ConfigError: the template cannot be read.
        """
        sources = _sources(folder, config)
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
            of_tools = sources.get(_WITH_TOOLS, sources.get(_DEFAULT, ""))
            self._knows_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(of_tools))
        except jinja2.TemplateError as error:
            raise ConfigError(f"{folder}: the chat template is wrong: {error}; download it again") from error
        self.call_style = _call_style(of_tools) if self._knows_tools else HERMES
        """How the model writes calls of tools. None: in a way that is not known here."""
        self._special_texts = {
            name: _token_text(config[name]) for name in ("bos_token", "eos_token") if config.get(name) is not None
        }

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
        """The text up to where the assistant begins.

        A template that knows nothing of tools gets them in the system's turn, as Hermes and Qwen write them.

        :raises InvalidInputError: there is no template, or it refuses these messages.
        """
        template = self._templates.get(_WITH_TOOLS if tools else _DEFAULT, self._templates.get(_DEFAULT))
        if template is None:
            raise InvalidInputError("this model has no chat template: use /v1/completions")
        try:
            if not self._knows_tools:
                messages, tools = as_plain_turns(messages, tools or ()), None
            return template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=True, **self._special_texts
            )
        except Exception as error:  # filters raise whatever Python does for a message of another form
            raise InvalidInputError(f"the model's chat template refuses these messages: {error}") from error


def _call_style(source: str) -> CallStyle | None:
    """What a template that knows tools has the model write. Qwen3-Coder's `<function=` is none of those known."""
    if "<tool_call>" in source and "<function=" not in source:
        return HERMES
    return LLAMA if "ipython" in source else None


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Renders templates as Hugging Face does; sandboxed, because a template is code from the model's publisher."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        # jinja2's own escapes what HTML would read otherwise.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = tojson
    return environment


def _sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        named = {path.stem: path.read_text("utf-8") for path in folder.glob("additional_chat_templates/*.jinja")}
        return named | {_DEFAULT: file.read_text("utf-8")}
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates
        return {entry["name"]: entry["template"] for entry in source if {"name", "template"} <= entry.keys()}
    return {} if source is None else {_DEFAULT: source}


def _token_text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])
