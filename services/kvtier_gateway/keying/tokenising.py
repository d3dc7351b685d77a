"""Tokens of prompts, as engines make them, with a memory for conversations that grow."""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from tokenizers import Tokenizer

from kvtier.errors import InvalidInputError
from kvtier.text.prompts import PromptTokenizer

Tokens = npt.NDArray[np.int32]
_MOST_ID = 2**31 - 1
_MOST_CHARACTERS = 4 << 20
"""The longest text that is tokenised: a million tokens or so, for which the library takes some 700 MiB."""
_ENTRY_BYTES = 200
"""What an entry takes beside its tokens."""


class PromptTokens:
    """Tokenises requests. Any thread.

    A conversation that grows repeats all its earlier messages. Where the tokenizer allows it, its text is cut at
    special tokens, which stand between messages, and the tokens of each piece are remembered: so only what is new is
    tokenised.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        """
        :param folder: of the model, as engines have it.
        :param most_bytes: what is remembered at most; the pieces that were used longest ago go first.
        :raises ConfigError: the tokenizer or its chat template cannot be read.
        """
        self._prompts = PromptTokenizer(folder)
        self._cut = _special_tokens(self._prompts.tokenizer) if _is_separable(self._prompts.tokenizer) else None
        self._most_bytes, self._nbytes = most_bytes, 0  # guarded by _lock
        self._known: OrderedDict[bytes, Tokens] = OrderedDict()  # guarded by _lock
        self._lock = threading.Lock()

    def of_request(self, fields: Mapping[str, Any]) -> Tokens | None:
        """The tokens of a request's prompt; None where an engine would refuse it, nobody knows what it makes of it
        (several prompts, media, tools), or it has more than `_MOST_CHARACTERS`."""
        prompt, messages = fields.get("prompt"), fields.get("messages")
        if isinstance(prompt, str):
            is_long = len(prompt) > _MOST_CHARACTERS
            return None if is_long else self._remembered(b"prompt", [prompt], add_special_tokens=True)[0]
        if isinstance(prompt, list):
            return _ids(prompt)
        if isinstance(messages, list) and not fields.get("tools"):
            try:
                return self._of_chat(_plain(messages))
            except InvalidInputError:
                return None
        return None

    def _of_chat(self, messages: Sequence[Mapping[str, Any]]) -> Tokens | None:
        text = self._prompts.chat_text(messages)
        if len(text) > _MOST_CHARACTERS:
            return None
        pieces = [text] if self._cut is None else _with_their_special(self._cut.split(text))
        found = self._remembered(b"chat", [piece for piece in pieces if piece], add_special_tokens=False)
        return np.concatenate(found) if found else np.zeros(0, dtype=np.int32)

    def _remembered(self, kind: bytes, texts: Sequence[str], *, add_special_tokens: bool) -> list[Tokens]:
        """The tokens of each text."""
        # A collision would be a wrong key, and a wrong key a worse choice of an engine: no more.
        digest, known = xxhash.xxh3_128_digest, self._known
        names = [kind + digest(text.encode()) for text in texts]
        with self._lock:
            found = [known.get(name) for name in names]
            for name, tokens in zip(names, found, strict=True):
                if tokens is not None:
                    known.move_to_end(name)
        return [
            self._encoded(name, text, add_special_tokens) if tokens is None else tokens
            for name, text, tokens in zip(names, texts, found, strict=True)
        ]

    def _encoded(self, name: bytes, text: str, add_special_tokens: bool) -> Tokens:
        """The tokens of a text that is not known yet, remembered by this name."""
        tokens = self._prompts.encode(text, add_special_tokens=add_special_tokens)
        with self._lock:
            if name not in self._known:
                self._known[name] = tokens
                self._nbytes += tokens.nbytes + _ENTRY_BYTES
            while self._nbytes > self._most_bytes:
                _, oldest = self._known.popitem(last=False)
                self._nbytes -= oldest.nbytes + _ENTRY_BYTES
        return tokens


def _ids(prompt: Sequence[Any]) -> Tokens | None:
    """A prompt that is given as token ids; None where it is something else."""
    if set(map(type, prompt)) != {int}:  # numpy would make an array of texts, each of them as long as the longest one
        return None
    ids = np.array(prompt)
    if ids.dtype != np.int64 or ids.min() < 0 or ids.max() > _MOST_ID:
        return None
    return ids.astype(np.int32)


def _plain(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages as templates want them. Raises `InvalidInputError` for what is not text."""
    plain = []
    for message in messages:
        if not isinstance(message, dict):
            raise InvalidInputError("a message that is no object")
        content, role = message.get("content"), message.get("role")
        if isinstance(content, str) and role != "developer":
            plain.append(message)
            continue
        if isinstance(content, list):
            texts = [part.get("text") if isinstance(part, dict) else None for part in content]
            if not all(isinstance(text, str) for text in texts):
                raise InvalidInputError("parts that are not text")
            content = "\n".join(texts)  # type: ignore[arg-type] # they are text
        plain.append({**message, "role": "system" if role == "developer" else role, "content": content})
    return plain


def _special_tokens(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Finds special tokens, and keeps them when it splits."""
    texts = sorted((each.content for each in tokenizer.get_added_tokens_decoder().values()), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, texts))})") if texts else re.compile("(?!)")


def _with_their_special(parts: Sequence[str]) -> list[str]:
    """Half as many pieces to remember: every special token, which is each second part, with the text after it."""
    return [parts[0], *map(add, parts[1::2], parts[2::2])]


def _is_separable(tokenizer: Tokenizer) -> bool:
    """Whether the tokens of a text are those of its pieces between special tokens, and of these."""
    parts = json.loads(tokenizer.to_str())
    if any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in parts["added_tokens"]):
        return False
    if parts["normalizer"] not in (None, {"type": "NFC"}):
        return False
    splitter = parts["pre_tokenizer"] or {"type": "none"}
    steps = splitter["pretokenizers"] if splitter["type"] == "Sequence" else [splitter]
    return all(
        step["type"] in ("Split", "Digits") or (step["type"] == "ByteLevel" and not step["add_prefix_space"])
        for step in steps
    )
