"""Text to tokens and back."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import decoders

from kvtier.text.prompts import PromptTokenizer
from kvtier.text.tool_calls import CallStyle
from kvtier_engine.text.detokenizer import (
    ByteLevelDetokenizer,
    Detokenizer,
    TokenBytes,
    WindowDetokenizer,
    special_tokens,
)
from kvtier_engine.text.grammars import Grammars

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
"""How vocabularies of SentencePiece write bytes; a space they write as U+2581."""


class ChatTokenizer:
    """The tokenizer of a model folder. Immutable after construction; any thread may use it."""

    def __init__(self, folder: Path) -> None:
        """Raises as `PromptTokenizer`, which reads the folder."""
        self._prompts = PromptTokenizer(folder)
        self._tokenizer = self._prompts.tokenizer
        byte_level = isinstance(self._tokenizer.decoder, decoders.ByteLevel)
        self._token_bytes = TokenBytes(self._tokenizer) if byte_level else None
        self._special = special_tokens(self._tokenizer)

    @property
    def call_style(self) -> CallStyle | None:
        """How the model writes calls of tools. None: in a way that is not known here."""
        return self._prompts.template.call_style

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """Token ids of a plain prompt, with the model's own leading tokens (BOS) where it has some."""
        return self._prompts.encode(text)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> npt.NDArray[np.int32]:
        """Token ids of a conversation. Raises as `ChatTemplate.render`.

        :param messages: OpenAI's, each with `role` and `content`; arguments of calls are objects here.
        :param tools: OpenAI's.
        """
        text = self._prompts.template.render(messages, tools or None)
        return self._prompts.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of an answer, special tokens left out: what `detokenizer` makes of one token after the other."""
        detokenizer = self.detokenizer()
        return "".join(map(detokenizer.feed, token_ids)) + detokenizer.finish()

    def grammars(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Grammars:
        """Grammars of answers of a model with so many tokens."""
        return Grammars(self._tokenizer.to_str(), vocab_size, eos_token_ids)

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
