"""What a strategy's memory of a million distinct prompts takes."""

import itertools
import os
import random
import time
from pathlib import Path

from kvtier_bench.measuring.report import Case
from kvtier_bench.measuring.rounds import Samples, progress
from kvtier_gateway.routing.registry import make_strategy
from kvtier_gateway.routing.values import Candidate, EngineId, Prompt

_NUM_ENGINES = 8
_NUM_KEYS = 16
_PIECES = 10


def memory_cases(prefixes: int, strategy: str) -> list[Case]:
    """Distinct prompts of 16 keys and 1,024 characters, each chosen for, sent and finished."""
    chooser, source = make_strategy(strategy), random.Random(0)
    candidates = [Candidate(EngineId(f"http://engine-{i}:8000")) for i in range(_NUM_ENGINES)]
    before, numbers = _rss_bytes(), itertools.count()
    seconds: list[float] = []
    peaks = [before]
    with progress("distinct prompts", _PIECES) as advance:
        for _ in range(_PIECES):
            begun_s = time.perf_counter()
            for number in itertools.islice(numbers, prefixes // _PIECES):
                keys = [source.getrandbits(64) for _ in range(_NUM_KEYS)]
                prompt = Prompt(
                    num_tokens=_NUM_KEYS * 16, text=f"{number:064x}" * 16, keys=keys, tokens_per_block=16, tenant="red"
                )
                choice = chooser.choose(prompt, candidates, time.monotonic())
                chooser.sent(number, prompt, choice, time.monotonic())
                chooser.first_token(number, time.monotonic())
                chooser.finished(number, time.monotonic())
            seconds.append((time.perf_counter() - begun_s) / max(1, prefixes // _PIECES))
            peaks.append(_rss_bytes())
            advance()
    samples = Samples(rounds_s=seconds, calls_s=seconds)
    taken = (max(peaks) - before) / 2**20
    last = (peaks[-1] - peaks[-2]) / 2**20
    detail = f"{taken:,.0f} MiB more after {prefixes:,} distinct prompts, of which the last tenth took {last:,.0f}"
    figures = {"taken_mib": taken, "last_tenth_mib": last}
    return [Case.of(strategy, "distinct prompts", samples, detail=detail, figures=figures, unit="prompt")]


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
