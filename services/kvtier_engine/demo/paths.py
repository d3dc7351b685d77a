"""Time to first token of the same documents, computed and out of each tier."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from kvtier_engine.demo.ask import Answer, chat, forget
from kvtier_engine.demo.document import Person, age_of, asking, people
from kvtier_engine.demo.site import Site

_ANSWER_TOKENS = 12
Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Document:
    """A long document, and two questions about it."""

    persons: list[Person]

    @classmethod
    def make(cls, edition: int, num_people: int) -> "Document":
        return cls(people(edition, num_people))

    def question(self, number: int) -> Messages:
        return asking(self.persons, age_of(self.persons[5 + 7 * number]))


@dataclass(frozen=True, slots=True)
class Path:
    """One way to get the KV of a document, and the answers for which it was taken."""

    name: str
    tier: str
    """The tier that the KV was in; empty: none."""
    answers: list[Answer]

    @property
    def ttft_s(self) -> float:
        return median(answer.ttft_s for answer in self.answers)

    @property
    def cached_share(self) -> float:
        """The least share of a prompt that was in that tier; 0 for what was computed."""
        return min(answer.share_of(self.tier) for answer in self.answers)


def measure_paths(
    shared: str, remote: str, site: Site, documents: list[Document], note: Callable[[str], None]
) -> list[Path]:
    """Each document is computed by one engine, and read from every tier by it or by the other.

    :param shared: the URL of an engine that maps the pool's memory, and whose device has room for one document.
    :param remote: that of one that reaches the pool over TCP, and whose device has room for all.
    :return: in the order of their distance, the furthest first.
    """
    note("Engine A computes the documents")
    cold = []
    for document in documents:
        cold.append(chat(shared, document.question(0), _ANSWER_TOKENS))
        site.expect(cold[-1])
    site.settle()
    note("Engine B gets them from the pool over TCP")
    tcp = [chat(remote, document.question(1), _ANSWER_TOKENS) for document in documents]
    device = [chat(remote, document.question(1), _ANSWER_TOKENS) for document in documents]
    note("Engine A gets them from its host memory")
    host = [chat(shared, document.question(1), _ANSWER_TOKENS) for document in documents]
    note("Engine A forgets them, and gets them from the pool's memory")
    forget(shared)
    mapped = [chat(shared, document.question(1), _ANSWER_TOKENS) for document in documents]
    return [
        Path("computed", "", cold),
        Path("pool over TCP", "pool", tcp),
        Path("pool, shared memory", "pool", mapped),
        Path("host memory", "host", host),
        Path("device", "device", device),
    ]
