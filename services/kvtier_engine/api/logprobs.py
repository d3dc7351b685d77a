"""Log probabilities of tokens in OpenAI's two formats."""

from collections.abc import Sequence
from typing import Any, Protocol

from kvtier_engine.scheduling.completion import Logprobs
from kvtier_engine.text.detokenizer import Detokenizer


class Spelling(Protocol):
    """What is asked of a tokenizer: `ChatTokenizer`."""

    def is_special(self, token_id: int) -> bool: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def detokenizer(self) -> Detokenizer: ...


class ChatLogprobs:
    """The log probabilities of one chat answer: `choices[].logprobs`. Tokens that are no text are left out."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling

    def next(self, tokens: Sequence[tuple[int, Logprobs]]) -> dict[str, Any]:
        """The entries of the tokens that follow those of the last call."""
        content = [
            self._entry(token_id, logprobs.of_token) | {"top_logprobs": [self._entry(*each) for each in logprobs.top]}
            for token_id, logprobs in tokens
            if not self._spelling.is_special(token_id)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        spelled = self._spelling.token_bytes(token_id)
        return {"token": _text(spelled), "logprob": logprob, "bytes": list(spelled)}


class CompletionLogprobs:
    """The log probabilities of one completion: four lists with an entry for each token. Tokens that are no text are not
    in them."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling, self._detokenizer = spelling, spelling.detokenizer()
        self._offset = 0
        """Characters of the answer before the next token."""

    def next(self, tokens: Sequence[tuple[int, Logprobs]]) -> dict[str, Any]:
        """The entries of the tokens that follow those of the last call."""
        lists: dict[str, list[object]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, logprobs in tokens:
            if self._spelling.is_special(token_id):
                continue
            name = self._name(token_id)
            lists["tokens"].append(name)
            lists["token_logprobs"].append(logprobs.of_token)
            lists["top_logprobs"].append(
                {self._name(other): logprob for other, logprob in logprobs.top} | {name: logprobs.of_token}
            )
            lists["text_offset"].append(self._offset)
            self._offset += len(self._detokenizer.feed(token_id))
        return dict(lists)

    def _name(self, token_id: int) -> str:
        return _text(self._spelling.token_bytes(token_id), "bytes:")


def _text(spelled: bytes, prefix: str = "") -> str:
    """A token as text; one that is no UTF-8 by itself with each byte as \\xNN, so that tokens have different names."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in spelled)
