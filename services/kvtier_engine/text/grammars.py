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
_DEAD_END = "no answer, or none that begins as this one did, fits it"


class HeldAnswer:
    """How far one answer has come in its grammar. For one thread at a time.

    llguidance ends an answer that its limits or the grammar do not let go on, as if it were complete. Here that is an
    `InvalidInputError`: a simpler schema is the remedy.
    """

    def __init__(self, matcher: Any, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._matcher, self._vocab_size, self._eos_token_ids = matcher, vocab_size, eos_token_ids

    def copy(self) -> "HeldAnswer":
        """One that goes on by itself."""
        return HeldAnswer(self._matcher.deep_copy(), self._vocab_size, self._eos_token_ids)

    def allowed(self) -> Tensor:
        """bool `[vocab_size]` on CPU: tokens that may come next; what ends an answer is one where it is complete."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._require_no_error()
        found = np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(np.bool_)
        if not self._matcher.is_accepting() and (found[list(self._eos_token_ids)].any() or not found.any()):
            raise InvalidInputError(_DEAD_END)
        return torch.from_numpy(found)

    def accept(self, token_id: int) -> None:
        """This one has come, which was allowed."""
        self._matcher.consume_token(token_id)
        self._require_no_error()

    def _require_no_error(self) -> None:
        if self._matcher.is_error():
            error = self._matcher.get_error().partition("\n")[0]
            raise InvalidInputError(_DEAD_END if error.startswith("NoExtension") else _PLACE.sub("", error))


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

        :raises InvalidInputError: a part of it is no JSON schema, or unknown to llguidance, or no answer fits it.
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
        beginning = HeldAnswer(matcher, self._vocab_size, self._eos_token_ids)
        beginning.allowed()
        return beginning
