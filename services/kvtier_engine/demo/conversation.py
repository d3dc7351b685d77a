"""A conversation whose turns go to two engines, as a load balancer would send them."""

from dataclasses import dataclass

from kvtier_engine.demo.ask import Answer, chat
from kvtier_engine.demo.document import asking, people
from kvtier_engine.demo.site import Site

_ANSWER_TOKENS = 24
_EDITION = 90
_NUM_PEOPLE = 12
_QUESTIONS = (
    "Who of them lives in Japan, or which country is named most?",
    "Who is the oldest of them?",
    "What does the youngest of them do?",
    "Write a greeting to that one.",
    "Make it shorter.",
    "And in a more formal tone?",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: which engine had it, and what it said."""

    engine: str
    answer: Answer

    @property
    def tokens_by_source(self) -> dict[str, int]:
        """The prompt's tokens, by tier or `computed`."""
        cached = {tier: count for tier, count in self.answer.cached_by_tier.items() if count}
        return {**cached, "computed": self.answer.prompt_tokens - self.answer.cached_tokens}


def converse(urls: tuple[str, str], site: Site) -> list[Turn]:
    """Six turns over two engines in turn. Each prompt is the whole conversation so far."""
    messages = asking(people(_EDITION, _NUM_PEOPLE), _QUESTIONS[0])
    turns: list[Turn] = []
    for number, question in enumerate(_QUESTIONS):
        if number:
            messages.append({"role": "user", "content": question})
        answer = chat(urls[number % 2], messages, _ANSWER_TOKENS)
        messages.append({"role": "assistant", "content": answer.text})
        turns.append(Turn("AB"[number % 2], answer))
        site.expect(answer)
        site.settle()
    return turns
