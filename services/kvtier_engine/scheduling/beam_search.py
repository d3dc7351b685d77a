"""Beam search: the likeliest whole answers, instead of drawn ones.

Which beams go on and when a search is over is as in transformers (5.24, `generation/utils.py`, `_beam_search`), so that
answers can be compared. Here every beam is a branch of a request, and what it forks from shares its blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSettings:
    """How answers are searched for."""

    width: int
    """How many unfinished answers are followed, and how many are found: 2 at the least."""
    length_penalty: float = 1.0
    """The sum of an answer's log probabilities is divided by its length to this power: large prefers long answers."""
    early_stopping: bool = False
    """True: the search is over as soon as `width` answers have ended. False: when no better one is likely."""


class Continuation(NamedTuple):
    """One beam of the next step."""

    parent: int
    """The beam that it continues."""
    beam: int
    """Its own name: that of the parent, for one of those that continue it."""
    token_id: int


class Hypothesis(NamedTuple):
    """An answer that has ended."""

    score: float
    token_ids: tuple[int, ...]


class BeamSearch:
    """One search. Beams are named 0 to `width` - 1. Scheduler thread only."""

    def __init__(self, settings: BeamSettings, max_tokens: int, eos_token_ids: Sequence[int]) -> None:
        self._settings, self._max_tokens, self._eos_token_ids = settings, max_tokens, eos_token_ids
        self._num_kept = max(2, 1 + len(eos_token_ids)) * settings.width
        """How many candidates are kept, so that enough of them have not ended."""
        self._scores = {0: 0.0}
        """The sum of log probabilities of each beam."""
        self._offers: dict[int, list[tuple[float, int]]] = {}
        """The likeliest next tokens of beams, with the sum that each would have."""
        self.found: list[Hypothesis] = []
        """The best answers that have ended, the best first."""

    @property
    def is_ready(self) -> bool:
        """Whether all beams have been offered their next tokens."""
        return self._offers.keys() == self._scores.keys()

    def awaits_others(self, beam: int) -> bool:
        """Whether a beam has its offer, and others have not."""
        return beam in self._offers

    def offer(self, beam: int, logits: Tensor) -> None:
        """What follows a beam: float32 `[vocab_size]`. Waits for the device."""
        wide = logits.double().cpu()
        values, ids = (wide - wide.logsumexp(0)).topk(min(self._num_kept, wide.numel()))
        score = self._scores[beam]
        self._offers[beam] = [(score + value, i) for value, i in zip(values.tolist(), ids.tolist(), strict=True)]

    def advance(self, answers: Mapping[int, Sequence[int]]) -> list[Continuation]:
        """Returns the beams of the next step; none when the search is over. Beams that are nobody's parent have ended.

        :param answers: the tokens of each beam so far.
        """
        width = self._settings.width
        candidates = sorted(
            ((score, beam, token_id) for beam, offers in self._offers.items() for score, token_id in offers),
            key=lambda candidate: candidate[0],
            reverse=True,
        )[: self._num_kept]
        length = 1 + len(next(iter(answers.values())))
        is_last = length >= self._max_tokens
        for score, beam, token_id in candidates[:width]:
            if is_last or token_id in self._eos_token_ids:
                self.found.append(Hypothesis(self._normed(score, length), (*answers[beam], token_id)))
        self.found = sorted(self.found, key=lambda hypothesis: hypothesis.score, reverse=True)[:width]
        going_on = [each for each in candidates if each[2] not in self._eos_token_ids][:width]
        self._offers.clear()
        if is_last or not self._may_improve(going_on[0][0], length):
            return []
        return self._continue(going_on)

    def _normed(self, score: float, length: int) -> float:
        return score / float(length**self._settings.length_penalty)

    def _may_improve(self, best_score: float, length: int) -> bool:
        """A guess, since a longer answer may be the better one per token: the best beam if it ended here."""
        if len(self.found) < self._settings.width:
            return True
        return not self._settings.early_stopping and self._normed(best_score, length) > self.found[-1].score

    def _continue(self, candidates: Sequence[tuple[float, int, int]]) -> list[Continuation]:
        parents = {beam for _, beam, _ in candidates}
        free = [beam for beam in range(self._settings.width) if beam not in parents]
        self._scores, continuations = {}, []
        for score, parent, token_id in candidates:
            beam = free.pop() if parent in self._scores else parent
            self._scores[beam] = score
            continuations.append(Continuation(parent, beam, token_id))
        return continuations
