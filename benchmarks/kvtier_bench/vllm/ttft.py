"""Time to the first token of a short question about a long document that was read before."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence

from kvtier.clock import MONOTONIC
from kvtier.errors import KvtierError
from kvtier_bench.measuring.report import Case
from kvtier_bench.measuring.rounds import Samples, Subject, in_turn, progress, ratios
from kvtier_bench.processes.pool_process import PoolProcess
from kvtier_bench.vllm import contenders as names
from kvtier_bench.vllm.contenders import BLOCK, Contender, Forgets
from kvtier_bench.vllm.engine_process import EngineProcess
from kvtier_bench.vllm.pool_calls import calls_by_verb
from kvtier_bench.vllm.session import Session

_PATIENCE_S = 60.0
_BARS = (
    (names.HOST, names.OWN_HIT, 1.25),
    (names.POOL, names.OWN_HIT, 1.5),
    (names.POOL, names.NATIVE_FS, 1.0),
)
"""Ours, what it is held against, and how many times as long it may take."""
_BESIDE = (names.NO_CACHE, names.NATIVE_HOST, names.NATIVE_FS, names.EXAMPLE, names.LMCACHE)


class Prompts:
    """Random tokens: one document, and questions that no two have in common.

    A question fills the block in which the document ends, so that every way to keep KV can hit all blocks but one;
    vLLM's ExampleConnector keeps whole prompts but for their last block.
    """

    def __init__(self, num_tokens: int, vocabulary: int, *, seed: int = 0) -> None:
        """
        :param num_tokens: of the document.
        :param vocabulary: number of token ids.
        """
        self._vocabulary = vocabulary
        self._random = random.Random(f"{num_tokens} {seed}")
        self.question_tokens = BLOCK - num_tokens % BLOCK
        self.num_blocks = num_tokens // BLOCK
        """The number of blocks that a question can hit."""
        self._document = self.draw(num_tokens)

    def ask(self) -> list[int]:
        """The document with a new question."""
        return self._document + self.draw(self.question_tokens)

    def draw(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(self._vocabulary) for _ in range(num_tokens)]


class _Asked:
    """An engine that is asked about the document, again and again."""

    def __init__(self, contender: Contender, engine: EngineProcess, prompts: Prompts, pool: PoolProcess) -> None:
        self._contender, self._engine, self._prompts, self._pool = contender, engine, prompts, pool
        self._counters: Mapping[str, float] = {}
        self._calls: Counter[str] = Counter()

    def learn(self) -> None:
        """Blocks until all of the document is where it is to be found: what is saved needs a while to get there."""
        self.prepare()
        self._engine.generate([self._prompts.ask()], max_tokens=1)
        self._engine.settle()
        deadline = MONOTONIC() + _PATIENCE_S
        while True:
            self.prepare()
            try:
                self.run()
                return
            except KvtierError:
                if MONOTONIC() > deadline:
                    raise

    def prepare(self) -> None:
        if self._contender.forgets is not Forgets.NOTHING:
            self._engine.reset(connector=self._contender.forgets is Forgets.MEMORY)
        self._counters, self._calls = self._engine.counters(), calls_by_verb(self._pool)

    def run(self) -> list[float]:
        """The seconds of a question. Raises `KvtierError` if its hits are not from where they should be."""
        seconds, _ = self._engine.generate([self._prompts.ask()], max_tokens=1)
        used = {verb for verb, amount in (calls_by_verb(self._pool) - self._calls).items() if amount}
        self._contender.require_hits(self._prompts.num_blocks, self._counters, self._engine.counters(), used)
        self._engine.settle()  # now, not while the next engine is being timed
        return [seconds]


def measure(
    session: Session, chosen: Sequence[Contender], num_tokens: int, rounds: int
) -> tuple[list[Case], list[str]]:
    """Every contender in turn. Rows of the report, and lines below it."""
    notes: list[str] = []
    with session.started(chosen, prompt_tokens=num_tokens + BLOCK, notes=notes) as engines:
        prompts = Prompts(num_tokens, min(engine.vocabulary for engine in engines.values()))
        asked = {
            contender.name: _Asked(contender, engines[contender.name], prompts, session.pool)
            for contender in chosen
            if contender.name in engines
        }
        with progress("read the document", len(asked)) as advance:
            for each in asked.values():
                each.learn()
                advance()
        subjects = {name: Subject(each.run, each.prepare, (engines[name].pid,)) for name, each in asked.items()}
        samples = in_turn(subjects, rounds=rounds, label="time to first token")
    op = f"a question of {prompts.question_tokens} tokens after {num_tokens:,} that were read before"
    return [_case(name, op, samples) for name in samples], [*notes, *_verdicts(samples)]


def _case(name: str, op: str, samples: Mapping[str, Samples]) -> Case:
    own_hit = samples.get(names.OWN_HIT)
    floor = None if own_hit is None or name == names.OWN_HIT else (names.OWN_HIT, own_hit)
    beside = {other: samples[other] for other in _BESIDE if other in samples and other != name}
    is_ours = name in (names.HOST, names.POOL, names.POOL_TCP)
    return Case.of(name, op, samples[name], floor=floor, beside=beside if is_ours else None, unit="question")


def _verdicts(samples: Mapping[str, Samples]) -> list[str]:
    """How ours do against the bars."""
    lines = []
    for name, other, bar in _BARS:
        if name in samples and other in samples:
            took = ratios(samples[name].rounds_s, samples[other].rounds_s)
            lines.append(
                f"{name} takes {took.median_s:.2f} times as long as {other} ({took.min_s:.2f} .. {took.max_s:.2f}); "
                f"it is to take {bar:.2f} at most: {'met' if took.median_s <= bar else 'not met'}."
            )
    return lines
