"""Text to tokens and back, and the chat template."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders

from kvtier.errors import ConfigError, InvalidInputError
from kvtier_engine.text.detokenizer import (
    ByteLevelDetokenizer,
    Detokenizer,
    TokenBytes,
    WindowDetokenizer,
    special_tokens,
)
from kvtier_engine.text.json_grammar import JsonGrammars

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
"""How vocabularies of SentencePiece write bytes; a space they write as U+2581."""


class ChatTokenizer:
    """The tokenizer of a model folder. Immutable after construction; any thread may use it."""

    def __init__(self, folder: Path) -> None:
        """
        :param folder: holds tokenizer.json, and tokenizer_config.json or chat_template.jinja for chat.
        :raises ConfigError: tokenizer.json or the chat template cannot be read.
        """
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises plain Exception
            raise ConfigError(f"{folder / 'tokenizer.json'} cannot be read: {error}; download it again") from error
        byte_level = isinstance(self._tokenizer.decoder, decoders.ByteLevel)
        self._token_bytes = TokenBytes(self._tokenizer) if byte_level else None
        self._special = special_tokens(self._tokenizer)
        config = _read_tokenizer_config(folder)
        self._special_texts = {
            name: _token_text(config[name]) for name in ("bos_token", "eos_token") if config.get(name) is not None
        }
        source = _template_source(folder, config)
        try:
            self._template = None if source is None else _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"{folder}: the chat template is wrong: {error}; download it again") from error

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """Token ids of a plain prompt, with the model's own leading tokens (BOS) where it has some."""
        return np.array(self._tokenizer.encode(text).ids, dtype=np.int32)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> npt.NDArray[np.int32]:
        """Token ids of a conversation in the model's chat template, up to where the assistant begins.

        :param messages: each with `role` and `content`.
        :raises InvalidInputError: the model has no chat template, or its template refuses these messages.
        """
        if self._template is None:
            raise InvalidInputError("this model has no chat template: use /v1/completions")
        try:
            text = self._template.render(messages=messages, add_generation_prompt=True, **self._special_texts)
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise InvalidInputError(f"the model's chat template refuses these messages: {error}") from error
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of an answer, special tokens left out: what `detokenizer` makes of one token after the other."""
        detokenizer = self.detokenizer()
        return "".join(map(detokenizer.feed, token_ids)) + detokenizer.finish()

    def json_grammars(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> JsonGrammars:
        """Grammars of answers of a model with so many tokens."""
        return JsonGrammars(self._tokenizer.to_str(), vocab_size, eos_token_ids)

    def is_special(self, token_id: int) -> bool:
        """Whether a token is no text, as the one that ends an answer."""
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for by itself, in UTF-8, where it may end inside a character; special ones as written."""
        if self._token_bytes is not None and token_id not in self._special:
            return self._token_bytes(token_id)
        text: str = self._tokenizer.id_to_token(token_id) or ""
        byte = _BYTE_TOKEN.fullmatch(text)
        return bytes.fromhex(byte[1]) if byte else text.replace("\u2581", " ").encode()

    def detokenizer(self) -> Detokenizer:
        """Returns a detokenizer for the text of one answer while it comes."""
        if self._token_bytes is not None:
            return ByteLevelDetokenizer(self._token_bytes)
        return WindowDetokenizer(self._tokenizer, self._special)


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
