"""Tokens to text while they come: characters whole, each as soon as it is, O(1) per token."""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
_MOST_WAITING = 16
"""Tokens that may wait for the end of a character. Four would do if each were one byte; a few more when several in a
row begin in one character and end in the next. Bounds the work per token when an answer is no text at all."""


class Detokenizer(Protocol):
    """The text of one sequence of tokens. For one thread at a time."""

    def feed(self, token_id: int) -> str:
        """The characters that `token_id` completes; none when it ends inside of one, or is a special token."""

    def finish(self) -> str:
        """What is left of a character that never became whole: U+FFFD, or nothing. No `feed` after it."""


class ByteLevelDetokenizer:
    """Decodes for tokenizers whose tokens are bytes, each written as a printable character (GPT-2, Llama 3, Qwen,
    SmolLM2).

    What `feed` and `finish` return is together what `Tokenizer.decode` makes of all tokens at once.
    """

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        """:param bytes_of: what a token stands for, `TokenBytes`."""
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        return self._decoder.decode(self._bytes_of(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Decodes for all other tokenizers: a few tokens before each new one together with it, of which it takes what they
    add.

    The tokens before are there because many decoders treat the start of a text in another way (SentencePiece drops a
    space). A token that leaves a character unfinished waits for the next ones, but not for ever.
    The idea is that of vLLM's `detokenize_incrementally` (0.8, `transformers_utils/detokenizer_utils.py`).
    """

    def __init__(self, tokenizer: Tokenizer, special: frozenset[int]) -> None:
        """:param special: tokens that are no text, `special_tokens`."""
        self._tokenizer, self._special = tokenizer, special
        self._before: list[int] = []
        """Tokens whose text is out, the last ones."""
        self._waiting: list[int] = []
        """Tokens whose text is not."""

    def feed(self, token_id: int) -> str:
        if token_id in self._special or self._tokenizer.id_to_token(token_id) is None:
            return ""
        self._waiting.append(token_id)
        before, text = self._decode(self._before), self._decode([*self._before, *self._waiting])
        whole = text.startswith(before) and not text.endswith(_REPLACEMENT)
        if not whole and len(self._waiting) < _MOST_WAITING:
            return ""
        return self._take(before, text)

    def finish(self) -> str:
        return self._take(self._decode(self._before), self._decode([*self._before, *self._waiting]))

    def _take(self, before: str, text: str) -> str:
        waiting, self._waiting = self._waiting, []
        if not text.startswith(before):  # bytes that are no text take those before along when they are decoded together
            text, before = self._decode(waiting), ""
        if text != before:
            self._before = waiting
        elif not text:  # a token that adds nothing to the start of a text may still decide how the next one begins
            self._before += waiting
        return text[len(before) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids)
        return text


class TokenBytes:
    """What each token of a byte-level tokenizer stands for. Any thread; remembers what it was asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = special_tokens(tokenizer)
        self._known: dict[int, bytes] = {}
        """The bytes of tokens by id, at most one entry per token. Writing the same entry twice is harmless."""

    def __call__(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._look_up(token_id)
        return known

    def _look_up(self, token_id: int) -> bytes:
        text: str | None = None if token_id in self._special else self._tokenizer.id_to_token(token_id)
        if text is None:
            return b""
        try:
            return bytes(BYTE_OF_CHARACTER[character] for character in text)
        except KeyError:  # an added token that is written as it is
            return text.encode()


def special_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that answers leave out."""
    return frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)


def _byte_alphabet() -> dict[str, int]:
    """Which byte a character stands for: printable ones of Latin-1 for themselves, the others from U+0100 on.

    GPT-2's `bytes_to_unicode` (openai/gpt-2, `src/encoder.py`), which all byte-level tokenizers use.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()
"""How byte-level vocabularies write bytes."""
