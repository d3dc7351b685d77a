"""Answers that are held to a grammar: which tokens may come next, by llguidance, an optional dependency."""

import re
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtier.errors import ConfigError, InvalidInputError

_PLACE = re.compile(r"^at \d+\(\d+\): ")
"""The place of an error in the grammar, which nobody but us has seen."""


class HeldAnswer:
    """How far one answer has come in its grammar. For one thread at a time."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def copy(self) -> "HeldAnswer":
        """One that goes on by itself."""
        return HeldAnswer(self._matcher.deep_copy(), self._vocab_size)

    def allowed(self) -> Tensor:
        """bool `[vocab_size]` on CPU: tokens that may come next; what ends an answer is one where it is complete."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return torch.from_numpy(np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(np.bool_))

    def accept(self, token_id: int) -> None:
        """This one has come, which was allowed."""
        self._matcher.consume_token(token_id)


class Grammars:
    """Compiles grammars for one tokenizer. Any thread; the first one takes about a second."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """
        :param tokenizer_json: the contents of tokenizer.json.
        :param vocab_size: the model's, which may be more than its tokenizer has.
        """
        self._tokenizer_json, self._vocab_size, self._eos_token_ids = tokenizer_json, vocab_size, eos_token_ids
        self._lock = threading.Lock()
        self._tokenizer: Any = None  # guarded by _lock; llguidance's, once somebody wants it

    def compile(self, grammar: str) -> HeldAnswer:
        """The beginning of an answer of `grammar`, in llguidance's dialect of Lark, such as `grammar_of_answers` makes.

        :raises InvalidInputError: it has a part that is no JSON schema, or of which llguidance does not know a part.
        :raises ConfigError: llguidance is not installed.
        """
        try:
            import llguidance
        except ImportError as error:
            raise ConfigError(
                "for answers that are held to a schema, llguidance is missing: in a checkout of kvtier, "
                "pip install '.[json]'"
            ) from error
        with self._lock:
            if self._tokenizer is None:
                ends = list(self._eos_token_ids) or None
                self._tokenizer = llguidance.LLTokenizer(self._tokenizer_json, self._vocab_size, ends)
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise InvalidInputError(_PLACE.sub("", matcher.get_error().partition("\n")[0]))
        return HeldAnswer(matcher, self._vocab_size)
