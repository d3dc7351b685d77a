"""Prompts that have nothing in common: what keeping KV costs those who never hit, in tokens per second and CPU time."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from kvtier.errors import KvtierError
from kvtier_bench.measuring.report import Case
from kvtier_bench.measuring.rounds import Samples, Subject, in_turn, ratios
from kvtier_bench.processes.family import await_rest, family
from kvtier_bench.vllm.contenders import BLOCK, Contender, Forgets, kvtier
from kvtier_bench.vllm.engine_process import EngineProcess
from kvtier_bench.vllm.pool_calls import num_written
from kvtier_bench.vllm.session import Session
from kvtier_bench.vllm.ttft import Prompts

_PROMPTS, _PROMPT_TOKENS, _NEW_TOKENS = 4, 512, 32
"""The prompts of a round, their length, and the length of the answers. All prompts come at once."""
_SAVED = "vllm:kvtier_saved_blocks"
_PLAIN, _SAVING, _NO_STORE = "no connector", "kvtier, saving", "kvtier, no_store"
_CONTROL = "no connector, again"
"""Another engine without one: what it differs by is not the connectors'."""
_STARTS = 3
"""How often all engines are started: where a process lies in memory decides how fast it is as long as it lives."""
_BARS = {_SAVING: 0.95, _NO_STORE: 0.98}
"""The bars, as shares of the tokens per second without a connector."""
_MOST_CPU = 1.02
"""The bar for both: the CPU time of all processes of ours, in that of an engine without a connector."""
_NO_STORE_PARAMS = {"kvtier": {"no_store": True}}


class _Batches:
    """An engine that is given batch after batch of unrelated prompts."""

    num_tokens = _PROMPTS * (_PROMPT_TOKENS + _NEW_TOKENS)
    """Read and written in a round."""
    num_blocks = _PROMPTS * ((_PROMPT_TOKENS + _NEW_TOKENS - 1) // BLOCK)
    """Filled in a round."""

    def __init__(self, contender: Contender, engine: EngineProcess, prompts: Prompts, pids: tuple[int, ...]) -> None:
        """:param pids: all that works for this engine: it, its children, and its pool."""
        self._contender, self._engine, self._prompts, self._pids = contender, engine, prompts, pids
        self._params: Mapping[str, Any] | None = _NO_STORE_PARAMS if contender.name == _NO_STORE else None
        self._before: Mapping[str, float] = {}

    def prepare(self) -> None:
        self._before = self._engine.counters()

    def run(self) -> list[float]:
        """The seconds of a round, until all are answered. Returns when what they cause is done, too.

        Raises `KvtierError` for a hit.
        """
        batch = [self._prompts.draw(_PROMPT_TOKENS) for _ in range(_PROMPTS)]
        seconds, _ = self._engine.generate(batch, max_tokens=_NEW_TOKENS, params=self._params)
        self._contender.require_hits(0, self._before, self._engine.counters(), set())
        self._engine.settle()
        await_rest(self._pids)  # blocks are still on their way to the pool
        return [seconds]

    def require_saved(self, rounds: int) -> None:
        """Raises `KvtierError` unless all was saved that should be, and nothing else."""
        self.run()  # vLLM hears of what was saved when it has something to do again
        num_saved = self._engine.counters().get(_SAVED, 0)
        expected = rounds * self.num_blocks if self._contender.name == _SAVING else 0
        if num_saved < expected or (num_saved and not expected):
            raise KvtierError(f"{self._contender.name}: {num_saved:.0f} blocks were saved, not {expected}")


def measure(session: Session, rounds: int) -> tuple[list[Case], list[str]]:
    """Measures engines without a connector, with ours, and with requests that ask it to save nothing, in turn."""
    ours = kvtier(session.pool.unix)
    contenders = [
        Contender(_PLAIN, Forgets.NOTHING),
        Contender(_SAVING, Forgets.NOTHING, transfer=ours),
        Contender(_CONTROL, Forgets.NOTHING),
        Contender(_NO_STORE, Forgets.NOTHING, transfer=ours),
    ]
    written = num_written(session.pool)
    samples = {each.name: Samples() for each in contenders}
    shares = [len(range(start, rounds, _STARTS)) for start in range(_STARTS)]
    for start, share in enumerate(filter(None, shares), 1):
        for name, more in _in_turn(session, contenders, share, start).items():
            samples[name].extend(more)
    if num_written(session.pool) - written < rounds * _Batches.num_blocks:
        raise KvtierError(f"{_SAVING}: not all blocks got to the pool: the figures would mean nothing")
    verdicts = [verdict for name in _BARS for verdict in (_verdict(name, samples), _cpu_verdict(name, samples))]
    control = [f"{share(_CONTROL, samples)}." for share in (_share_of, _cpu_of)]
    return [_case(name, samples) for name in samples], [*verdicts, *control]


def _in_turn(session: Session, contenders: Sequence[Contender], rounds: int, start: int) -> dict[str, Samples]:
    """Measures one start: engines that are started for it, and prompts that no other start had."""
    length = _PROMPT_TOKENS + _NEW_TOKENS
    with session.started(contenders, prompt_tokens=length, at_once=_PROMPTS, notes=[]) as engines:
        prompts = Prompts(BLOCK, min(engine.vocabulary for engine in engines.values()), seed=start)
        pids = {each.name: _pids(each, engines[each.name], session) for each in contenders}
        batches = {each.name: _Batches(each, engines[each.name], prompts, pids[each.name]) for each in contenders}
        subjects = {name: Subject(each.run, each.prepare, pids[name]) for name, each in batches.items()}
        samples = in_turn(subjects, rounds=rounds, label=f"throughput, start {start} of {_STARTS}")
        for name in (_SAVING, _NO_STORE):
            batches[name].prepare()
            batches[name].require_saved(rounds)
    return samples


def _pids(contender: Contender, engine: EngineProcess, session: Session) -> tuple[int, ...]:
    """Returns the ids of all processes whose CPU time is this engine's."""
    return (*family(engine.pid), *([session.pool.pid] if contender.transfer is not None else []))


def _case(name: str, samples: Mapping[str, Samples]) -> Case:
    op = f"{_PROMPTS} unrelated prompts of {_PROMPT_TOKENS} tokens, {_NEW_TOKENS} new ones each"
    floor = None if name == _PLAIN else (_PLAIN, samples[_PLAIN])
    case = Case.of(name, op, samples[name], floor=floor, unit="batch")
    assert case.p50_us is not None
    figures = {
        "tokens_per_s": _Batches.num_tokens / (case.p50_us / 1e6),
        "cpu_ms_per_prompt": median(samples[name].rounds_cpu_s) / _PROMPTS * 1e3,
    }
    return replace(case, figures=figures)


def _verdict(name: str, samples: Mapping[str, Samples]) -> str:
    bar = _BARS[name]
    is_met = ratios(samples[_PLAIN].rounds_s, samples[name].rounds_s).median_s >= bar
    return f"{_share_of(name, samples)}; it is to be {bar:.2f} at least: {'met' if is_met else 'not met'}."


def _cpu_verdict(name: str, samples: Mapping[str, Samples]) -> str:
    is_met = ratios(samples[name].rounds_cpu_s, samples[_PLAIN].rounds_cpu_s).median_s <= _MOST_CPU
    return f"{_cpu_of(name, samples)}; it is to be {_MOST_CPU:.2f} at most: {'met' if is_met else 'not met'}."


def _cpu_of(name: str, samples: Mapping[str, Samples]) -> str:
    ratio = ratios(samples[name].rounds_cpu_s, samples[_PLAIN].rounds_cpu_s)
    return f"{name}: {ratio.median_s:.3f} of the CPU time without a connector ({ratio.min_s:.3f} .. {ratio.max_s:.3f})"


def _share_of(name: str, samples: Mapping[str, Samples]) -> str:
    share = ratios(samples[_PLAIN].rounds_s, samples[name].rounds_s)
    return (
        f"{name}: {share.median_s:.3f} of the tokens per second without a connector ({share.min_s:.3f} .. "
        f"{share.max_s:.3f})"
    )
