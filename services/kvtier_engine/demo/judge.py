"""Whether answers out of the cache are those that are computed, token for token."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvtier_engine.demo.ask import Answer, chat, forget
from kvtier_engine.demo.document import asking, people
from kvtier_engine.demo.site import Site
from kvtier_engine.demo.stage import Stage

DTYPES = ("bfloat16", "float32")
_ANSWER_TOKENS = 24
_NUM_PEOPLE = 2
_NUM_AT_A_TIME = 4
_QUESTIONS = (
    "Write a short story about {}.",
    "Introduce {} at a conference.",
    "What may {} do on a Sunday?",
    "Write a letter to {}.",
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answers of one dtype to the same prompts, computed and from the pool."""

    dtype: str
    cold: list[Answer]
    cached: list[Answer]

    @property
    def num_different(self) -> int:
        return sum(a.token_ids != b.token_ids for a, b in zip(self.cold, self.cached, strict=True))

    @property
    def cached_share(self) -> float:
        """The share of all prompt tokens that came from the pool the second time."""
        from_pool = sum(answer.cached_by_tier.get("pool", 0) for answer in self.cached)
        return from_pool / sum(answer.prompt_tokens for answer in self.cached)


def prompts(count: int) -> list[list[dict[str, str]]]:
    """Prompts that have nothing in common but their first words."""
    made = []
    for number in range(count):
        persons = people(100 + number, _NUM_PEOPLE)
        made.append(asking(persons, _QUESTIONS[number % len(_QUESTIONS)].format(persons[0].name)))
    return made


def judge(stage: Stage, site: Site, num_prompts: int, note: Callable[[str], None]) -> list[Verdict]:
    """Two engines at the same time, one thread each; bfloat16 over shared memory, float32 over TCP.

    Each is asked several prompts at a time, as by several clients: an answer may depend on those beside it no more than
    on the cache.
    """
    note(f"{num_prompts} prompts twice, in bfloat16 and in float32")
    asked = prompts(num_prompts)
    with ThreadPoolExecutor(len(DTYPES)) as threads:
        verdicts = threads.map(lambda way: _judge(stage, way, asked), zip(DTYPES, (site.unix, site.tcp), strict=True))
        return list(verdicts)


def _judge(stage: Stage, way: tuple[str, str], asked: list[list[dict[str, str]]]) -> Verdict:
    dtype, address = way
    settings = {"num_threads": 1}
    with stage.engine(f"judge-{dtype}", tenant="red", pool_address=address, dtype=dtype, settings=settings) as engine:
        url = engine.ready()["url"]
        cold = _ask(url, asked)
        forget(url)
        cached = _ask(url, asked)
    return Verdict(dtype, cold, cached)


def _ask(url: str, asked: list[list[dict[str, str]]]) -> list[Answer]:
    with ThreadPoolExecutor(_NUM_AT_A_TIME) as clients:
        return list(clients.map(lambda messages: chat(url, messages, _ANSWER_TOKENS), asked))
