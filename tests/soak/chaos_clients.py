"""The clients of `make chaos`, one for each engine, and what every answer is held against."""

import random
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import httpx

from chaos_site import SECRETS, TENANT_OF, Member
from kvtier.identity.keys import BlockHasher, BlockKey, PrefixHasher, tenant_id

TOKENS_PER_BLOCK = 16
ANSWER_TOKENS = 6
_DOCUMENT_TOKENS, _QUESTION_TOKENS = 9 * TOKENS_PER_BLOCK, 20
_VOCABULARY = range(1000, 40_000)
_TIMEOUT_S = 120.0
"""Seconds that one request may take: more than any engine takes, stopped ones included."""
_RESETS = 0.4
"""How many requests come after the engine was told to forget what it has itself."""
_POLL_S = 0.05
Prompt = tuple[int, ...]


def prompts(seed: int, num_documents: int, num_questions: int) -> list[Prompt]:
    """Token ids, each question about each document."""
    rng = random.Random(f"{seed}/prompts")
    documents = [rng.choices(_VOCABULARY, k=_DOCUMENT_TOKENS) for _ in range(num_documents)]
    questions = [rng.choices(_VOCABULARY, k=_QUESTION_TOKENS) for _ in range(num_questions)]
    return [tuple(document + question) for document in documents for question in questions]


class History:
    """Which blocks each tenant has asked for: nothing else may be a hit for it. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: defaultdict[str, Counter[BlockKey]] = defaultdict(Counter)
        """Guarded by _lock."""
        self._hashers = {
            name: BlockHasher(tenant_id(name), PrefixHasher(secret.encode(), "", TOKENS_PER_BLOCK))
            for name, secret in SECRETS.items()
        }

    def blocks(self, tenant: str, tokens: Prompt) -> list[BlockKey]:
        return self._hashers[tenant].hash_blocks(list(tokens))

    def note(self, tenant: str, tokens: Prompt) -> None:
        with self._lock:
            self._asked[tenant].update(self.blocks(tenant, tokens))

    def most_cached_tokens(self, tenant: str, prompt: Prompt) -> int:
        """How many tokens of a prompt that the tenant has just asked may have been there before."""
        with self._lock:
            asked = self._asked[tenant]
            blocks = self.blocks(tenant, prompt)
            count = next((i for i, block in enumerate(blocks) if asked[block] < 2), len(blocks))
        return count * TOKENS_PER_BLOCK

    def names(self, tenant: str) -> set[BlockKey]:
        """All blocks that the tenant may have in any tier."""
        with self._lock:
            return set(self._asked[tenant])


@dataclass
class Tally:
    """What was found. Guarded by `lock`."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    counts: Counter[str] = field(default_factory=Counter)
    hit_tokens: Counter[str] = field(default_factory=Counter)
    """By tier."""
    problems: list[str] = field(default_factory=list)
    slowest_s: float = 0.0

    def problem(self, text: str) -> None:
        with self.lock:
            self.problems.append(text)


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine said."""

    tokens: list[int]
    hit_tokens: dict[str, int]
    """By tier."""


def ask(http: httpx.Client, url: str, prompt: Prompt) -> Answer:
    """Raises `httpx.HTTPError` without an answer."""
    body = {"prompt": list(prompt), "max_tokens": ANSWER_TOKENS, "temperature": 0}
    response = http.post(f"{url}/v1/completions", json=body).raise_for_status()
    answer = response.json()
    details = answer["usage"]["prompt_tokens_details"]
    return Answer(answer["kvtier"]["token_ids"], details["cached_tokens_by_tier"])


def new_client() -> httpx.Client:
    """One that leaves no connection open to engines that are killed."""
    return httpx.Client(timeout=_TIMEOUT_S, limits=httpx.Limits(max_keepalive_connections=0))


class Asker:
    """Asks one engine, one prompt at a time, and compares. A thread of its own, but for what `Tally` guards."""

    def __init__(
        self,
        engine: Member,
        right: dict[Prompt, list[int]],
        asked: list[Prompt],
        history: History,
        tally: Tally,
        seed: int,
    ) -> None:
        """:param asked: those of the prompts that it asks, over and over."""
        self._engine, self._right, self._history, self._tally = engine, right, history, tally
        self._tenant = TENANT_OF[engine.name]
        self._asked = asked
        self._rng = random.Random(f"{seed}/{engine.name}")
        self._http = new_client()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"kvtier-{engine.name}")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when the last answer has come."""
        self._ends.set()
        self._thread.join()

    def close(self) -> None:
        self._http.close()

    def once(self, prompt: Prompt, *, forgetting: bool) -> Answer:
        """Asks until an engine that lives has answered, and compares.

        A request to an engine that is killed meanwhile is asked again when another process has taken its place, and
        counts as `interrupted`; every other one without an answer is a failed one.

        :param forgetting: whether the engine forgets what it has itself, before.
        """
        while True:
            life = self._life()
            self._history.note(self._tenant, prompt)
            began_s = time.monotonic()
            try:
                if forgetting:
                    self._http.post(f"{self._engine.url}/v1/cache/reset").raise_for_status()
                answer = ask(self._http, self._engine.url, prompt)
            except httpx.HTTPError as error:
                if not self._has_died_since(life):
                    self._tally.problem(f"{self._engine.name} failed a request: {error!r}")
                    return Answer([], {})
                with self._tally.lock:
                    self._tally.counts["interrupted"] += 1
                continue
            self._compare(prompt, answer, time.monotonic() - began_s)
            return answer

    def _run(self) -> None:
        while not self._ends.is_set():
            self.once(self._rng.choice(self._asked), forgetting=self._rng.random() < _RESETS)

    def _life(self) -> int:
        """Which process it is, when it serves."""
        while True:
            self._engine.is_up.wait(_TIMEOUT_S)
            life = self._engine.num_starts
            try:
                self._http.get(f"{self._engine.url}/health").raise_for_status()
                return life
            except httpx.HTTPError:
                time.sleep(_POLL_S)

    def _has_died_since(self, life: int) -> bool:
        return not self._engine.is_up.is_set() or self._engine.num_starts != life

    def _compare(self, prompt: Prompt, answer: Answer, seconds: float) -> None:
        name, right = self._engine.name, self._right[prompt]
        cached, most = sum(answer.hit_tokens.values()), self._history.most_cached_tokens(self._tenant, prompt)
        self._history.note(self._tenant, (*prompt, *right))
        with self._tally.lock:
            self._tally.counts.update({"requests": 1, "tokens_compared": len(right), "prompt_tokens": len(prompt)})
            self._tally.hit_tokens.update(answer.hit_tokens)
            self._tally.slowest_s = max(self._tally.slowest_s, seconds)
            if answer.tokens != right:
                self._tally.counts["wrong"] += 1
                self._tally.problems.append(f"{name} answered {answer.tokens}, not {right}; hits {answer.hit_tokens}")
            if cached > most:
                self._tally.counts["foreign_hit_tokens"] += cached - most
                self._tally.problems.append(f"{name} had {cached} tokens cached of which its tenant had asked {most}")
