"""The text of one answer, from its tokens, up to a stop sequence."""

from collections.abc import Iterable, Sequence

from kvtier_engine.text.detokenizer import Detokenizer
from kvtier_engine.text.stop_sequences import StopMatcher


class AnswerText:
    """What a reader sees of tokens while they come. For one thread at a time.

    Stop sequences are looked for in the text, here on the reader's side: so the engine's loop knows nothing of text,
    and pays for neither decoding nor searching. It hears of a match afterwards, and computes a token or two in vain.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop)
        self.num_tokens = 0
        """Tokens up to the one that completed a stop sequence, or all."""

    @property
    def stopped(self) -> bool:
        """Whether a stop sequence was found. Tokens fed from then on are ignored."""
        return self._matcher.found

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that becomes certain with these tokens."""
        shown = []
        for token_id in token_ids:
            if self.stopped:
                break
            self.num_tokens += 1
            shown.append(self._matcher.feed(self._detokenizer.feed(token_id)))
        return "".join(shown)

    def finish(self) -> str:
        """The rest of the text, when no more tokens come."""
        if self.stopped:
            return ""
        return self._matcher.feed(self._detokenizer.finish()) + self._matcher.finish()
