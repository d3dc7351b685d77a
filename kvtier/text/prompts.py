"""Prompts and conversations to tokens, by the tokenizer and the chat template of a model folder."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from kvtier.errors import ConfigError
from kvtier.text.chat_template import ChatTemplate


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
        self.template = ChatTemplate(folder, _read_tokenizer_config(folder))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> npt.NDArray[np.int32]:
        """Token ids of a text, with the model's own leading tokens (BOS) where it has some and they are wanted."""
        # `Tokenizer.encode` holds the GIL to its end, which is seconds for a long text; what encodes several texts lets
        # go of it, and takes half the time.
        encoded = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        return np.array(encoded.ids, dtype=np.int32)

    def chat_text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """A conversation in the model's chat template, up to where the assistant begins. To be encoded without the
        model's own leading tokens, which the template has.

        :param messages: each with `role` and `content`.
        :raises InvalidInputError: the model has no chat template, or its template refuses these messages.
        """
        return self.template.render(messages, None)


def _read_tokenizer_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; download it again") from error
    return config if isinstance(config, dict) else {}
