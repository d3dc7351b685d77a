"""Prompts and conversations to tokens, by the tokenizer and the chat template of a model folder."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from kvtier.errors import ConfigError, InvalidInputError


class PromptTokenizer:
    """The tokenizer of a model folder. Immutable after construction; any thread may use it."""

    def __init__(self, folder: Path) -> None:
        """
        :param folder: holds tokenizer.json, and tokenizer_config.json or chat_template.jinja for chat.
        :raises ConfigError: tokenizer.json or the chat template cannot be read.
        """
        try:
            self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises plain Exception
            raise ConfigError(f"{folder / 'tokenizer.json'} cannot be read: {error}; download it again") from error
        config = _read_tokenizer_config(folder)
        self._special_texts = {
            name: _token_text(config[name]) for name in ("bos_token", "eos_token") if config.get(name) is not None
        }
        source = _template_source(folder, config)
        try:
            self._template = None if source is None else _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"{folder}: the chat template is wrong: {error}; download it again") from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> npt.NDArray[np.int32]:
        """Token ids of a text, with the model's own leading tokens (BOS) where it has some and they are wanted."""
        return np.array(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids, dtype=np.int32)

    def chat_text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """A conversation in the model's chat template, up to where the assistant begins. To be encoded without the
        model's own leading tokens, which the template has.

        :param messages: each with `role` and `content`.
        :raises InvalidInputError: the model has no chat template, or its template refuses these messages.
        """
        if self._template is None:
            raise InvalidInputError("this model has no chat template: use /v1/completions")
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special_texts)
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise InvalidInputError(f"the model's chat template refuses these messages: {error}") from error


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Renders templates as Hugging Face does; sandboxed, because a template is code from the model's publisher."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    return environment


def _read_tokenizer_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; download it again") from error
    return config if isinstance(config, dict) else {}


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    return source


def _token_text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])
