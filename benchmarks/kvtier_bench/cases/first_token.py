"""What benchmarks of time to first token have in common: prompts, and an engine that is asked for one token."""

import random
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from kvtier.clock import MONOTONIC
from kvtier.errors import KvtierError
from kvtier_engine.scheduling.completion import Completion
from kvtier_engine.scheduling.engine import Engine
from kvtier_engine.scheduling.sampling_params import Sampling

_PATIENCE_S = 10.0


class Prompts:
    """Random tokens, so that nothing is cached that is not meant to be."""

    def __init__(self, vocab_size: int, *, prompt_tokens: int, new_tokens: int, seed: int = 0) -> None:
        """:param new_tokens: of a follow-up, at the end of its `prompt_tokens`."""
        self._vocab_size = vocab_size
        self._prompt_tokens, self._new_tokens = prompt_tokens, new_tokens
        self._random = random.Random(seed)
        self.latest: list[int] = []

    def fresh(self) -> list[int]:
        self.latest = self._draw(self._prompt_tokens)
        return self.latest

    def follow_up(self) -> list[int]:
        """The latest document with another question."""
        return self.latest[: self._prompt_tokens - self._new_tokens] + self._draw(self._new_tokens)

    def _draw(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(self._vocab_size) for _ in range(num_tokens)]


class FirstToken:
    """Asks an engine for one token and waits."""

    def __init__(
        self, engine: Engine, registry: CollectorRegistry, left_s: Callable[[], float] = lambda: _PATIENCE_S
    ) -> None:
        """Call all of it in the engine's thread.

        :param left_s: the seconds that are left for all that is measured.
        """
        self._engine, self._registry, self._left_s = engine, registry, left_s
        self._num_computed = 0
        """Full blocks so far: what the pool must have got."""

    def wait_for(self, tokens: list[int], cached: dict[str, int]) -> None:
        """:param cached: how many tokens must come from where."""
        found = self.ask(tokens)
        if found != cached:
            raise KvtierError(f"the engine found {found} cached tokens: expected {cached}")

    def ask(self, tokens: list[int]) -> dict[str, int]:
        """How many of the tokens came from where."""
        completions: list[Completion] = []
        self._engine.submit(tokens, Sampling(max_tokens=1), MONOTONIC(), completions.append)
        self._engine.run_until(lambda: bool(completions))
        if completions[0].finish_reason != "length":
            raise KvtierError(f"the engine ended with {completions[0]}")
        cached = dict(completions[0].cached_by_tier)
        self._num_computed += (len(tokens) - sum(cached.values())) // 16
        return cached

    def settle(self) -> None:
        """Serves until the pool has everything that was computed.

        :raises KvtierError: it has not after ten seconds, or when no time is left.
        """
        deadline = MONOTONIC() + min(_PATIENCE_S, self._left_s())
        self._engine.run_until(lambda: self._num_written() >= self._num_computed or MONOTONIC() > deadline)
        written = self._num_written()
        if written < self._num_computed:
            raise KvtierError(f"{written:.0f} of {self._num_computed} blocks were written")

    def leave_to_the_pool(self) -> None:
        """Makes the engine forget, so that only the pool has the prompt."""
        self.settle()
        forgotten: list[int | None] = []
        self._engine.reset_cache(forgotten.append)
        self._engine.run_until(lambda: bool(forgotten))

    def _num_written(self) -> float:
        return sum(
            sample.value
            for family in self._registry.collect()
            if family.name == "kvtier_tier_blocks"
            for sample in family.samples
            if sample.labels.get("op") == "write" and sample.name.endswith("_total")
        )
