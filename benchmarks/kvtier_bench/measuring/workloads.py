"""Requests that share prefixes, and what serving them took. Imports no engine: each that is measured imports this."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

MAX_RUNNING = 8
"""Requests that an engine computes at a time."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of a round."""

    number: int
    """Its own in the round."""
    prompt: list[int]
    follow: Callable[[Sequence[int]], "list[Turn]"]
    """Takes the answer's tokens, and returns what follows at once."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one round. The same seed gives the same prompts."""

    turns: Callable[[Random, int], list[Turn]]
    """Takes the source of chance and the vocabulary's size, and returns what arrives first, all at once."""
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Round:
    """What one engine took for one round that began with nothing cached."""

    seconds: float
    ttft_s: Sequence[float]
    """One for each request."""
    num_computed: int
    """Prompt tokens."""
    answers: Sequence[Sequence[int]]
    """The answers' tokens, by the turns' numbers."""

    @property
    def num_answered(self) -> int:
        """Answer tokens."""
        return sum(map(len, self.answers))


def _tokens(chance: Random, vocab_size: int, count: int) -> list[int]:
    return [chance.randrange(vocab_size) for _ in range(count)]


def _conversations(chance: Random, vocab_size: int) -> list[Turn]:
    """Twelve conversations of five turns after one system prompt; each turn follows at once on the answer before."""
    system = _tokens(chance, vocab_size, 100)
    users = [[_tokens(chance, vocab_size, 50) for _ in range(5)] for _ in range(12)]

    def turn(number: int, history: list[int], left: list[list[int]]) -> list[Turn]:
        if not left:
            return []
        prompt = history + left[0]
        return [Turn(number, prompt, lambda answer: turn(number + 1, [*prompt, *answer], left[1:]))]

    begins = [system + _tokens(chance, vocab_size, 70) for _ in users]
    return [first for i, each in enumerate(users) for first in turn(10 * i, begins[i], each)]


def _documents(chance: Random, vocab_size: int) -> list[Turn]:
    """Forty questions of 20 tokens on eight documents of 450, in any order."""
    documents = [_tokens(chance, vocab_size, 450) for _ in range(8)]
    asked = [documents[number % 8] + _tokens(chance, vocab_size, 20) for number in range(40)]
    chance.shuffle(asked)
    return [Turn(number, prompt, lambda _: []) for number, prompt in enumerate(asked)]


WORKLOADS: Mapping[str, Workload] = {
    "12 conversations x 5 turns": Workload(_conversations, answer_tokens=16),
    "40 questions on 8 documents": Workload(_documents, answer_tokens=8),
}
LONGEST_TOKENS = 560
"""No prompt with its answer has more."""
