"""Serves the prompts of `kvtier bench invariant` under each condition, and compares their logits."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from kvtier.build.tiers import DISK, POOL
from kvtier.clock import MONOTONIC
from kvtier.config import parse_config
from kvtier.errors import KvtierError
from kvtier.identity.namespace import Namespace
from kvtier_bench.cases.invariant_conditions import PREEMPTIONS, REFERENCE, TOKENS_PER_BLOCK, Family, Setting
from kvtier_bench.measuring.blocks import TENANT
from kvtier_bench.processes.pool_process import PoolProcess
from kvtier_engine.assemble import engine_of
from kvtier_engine.model.llama import Chunk, LlamaModel
from kvtier_engine.model.model_config import ModelConfig
from kvtier_engine.model.paged_kv import PagedKV, allocate_kv
from kvtier_engine.scheduling.completion import Completion, NewToken
from kvtier_engine.scheduling.engine import Engine
from kvtier_engine.scheduling.sampling_params import Sampling

_MOST_NAMED = 3
"""Differences of a condition that are named one by one."""


class WatchedModel(LlamaModel):
    """A model of which the logits can be had, row by row. One thread."""

    def __init__(self, config: ModelConfig, *args: Any, **settings: Any) -> None:
        super().__init__(config, *args, **settings)
        self.config = config
        self._rows: list[tuple[int, int, Tensor]] = []
        """The end of each chunk of the last step, its last token, and the logits of what follows it."""

    def forward(self, chunks: Sequence[Chunk], kv: PagedKV) -> Tensor:
        logits = super().forward(chunks, kv)
        self._rows = [
            (chunk.start + len(chunk.token_ids), chunk.token_ids[-1], row)
            for chunk, row in zip(chunks, logits, strict=True)
        ]
        return logits

    def take(self, tokens: Sequence[int]) -> Tensor:
        """The logits that follow these tokens: float32 `[vocab_size]`. To be asked for within the step, in its order.

        Rows are told by their position and their last token.
        """
        wanted = len(tokens), tokens[-1]
        index = next(index for index, (*of, _) in enumerate(self._rows) if tuple(of) == wanted)
        return self._rows.pop(index)[-1]


@dataclass(slots=True)
class Outcome:
    """What was compared under one condition."""

    condition: str
    num_logits: int = 0
    """Vectors of logits that were compared: they follow tokens that are those of the reference."""
    num_different_logits: int = 0
    """Vectors of which any bit differs."""
    num_tokens: int = 0
    num_different_tokens: int = 0
    largest_difference: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    """Prompt tokens that were cached, by tier, and preemptions."""
    named: list[str] = field(default_factory=list)
    """The first differences, in words."""


class Comparison:
    """Serves the same prompts under each condition. One thread, the process's first."""

    def __init__(
        self,
        model: WatchedModel,
        namespace: Namespace,
        prompts: Sequence[Sequence[int]],
        *,
        answer_tokens: int,
        pool: PoolProcess,
        folder: Path,
        on_prompt: Callable[[], None] = lambda: None,
    ) -> None:
        """
        :param namespace: of the model's KV.
        :param pool: with memory for all prompts.
        :param folder: for a disk tier.
        :param on_prompt: called when a prompt has been answered.
        """
        self._model, self._namespace, self._prompts = model, namespace, prompts
        self._answer_tokens, self._on_prompt = answer_tokens, on_prompt
        self._token = pool.token
        self._below = {POOL: {"address": pool.unix}, DISK: {"directory": str(folder)}}
        self._reference: list[list[Tensor]] = []
        """What followed each prompt and its answer's tokens."""
        lengths = [-(-(len(prompt) + answer_tokens) // TOKENS_PER_BLOCK) for prompt in prompts]
        self._room, self._little_room = sum(lengths) + max(lengths), 5 * max(lengths) // 2

    def run(self, families: Sequence[Family]) -> list[Outcome]:
        """The reference, and all conditions of these families, in turn.

        :raises KvtierError: what a condition is about did not happen.
        """
        settings = [REFERENCE, *(setting for family in families for setting in family.settings)]
        return [outcome for setting in settings for outcome in self._outcomes(setting)]

    def _outcomes(self, setting: Setting) -> Iterator[Outcome]:
        registry = CollectorRegistry()
        with self._engine(setting, registry) as engine:
            for condition, expected in setting.conditions.items():
                outcome, before = Outcome(condition), _preemptions(registry)
                self._serve(engine, outcome)
                outcome.counts[PREEMPTIONS] = _preemptions(registry) - before
                if expected is not None and not outcome.counts.get(expected):
                    raise KvtierError(f"{condition}: there were none ({expected}: 0), so nothing was compared")
                yield outcome

    @contextmanager
    def _engine(self, setting: Setting, registry: CollectorRegistry) -> Iterator[Engine]:
        dtype, num_blocks = self._namespace.dtype, self._little_room if setting.has_little_room else self._room
        kv = allocate_kv(self._model.config, num_blocks, TOKENS_PER_BLOCK, getattr(torch, dtype))
        kv.tensor.fill_(float("nan"))
        config = parse_config(
            {
                "tenant": TENANT,
                "tenants": {TENANT: {"secret": "env:BENCH_SECRET", "token": "env:BENCH_TOKEN"}},
                "engine": {"dtype": dtype, **setting.engine},
                "cache": {"fetch": "always", "tokens_per_block": TOKENS_PER_BLOCK},
                "host": {"capacity_bytes": (self._room + 64) * kv.block_bytes},
                **{tier: self._below[tier] for tier in setting.below},
            },
            source="kvtier bench invariant",
            environ={"BENCH_SECRET": "of a benchmark, shared with nobody", "BENCH_TOKEN": self._token},
        )
        with engine_of(config, self._model, self._model.config, kv, self._namespace, registry) as engine:
            yield engine

    def _serve(self, engine: Engine, outcome: Outcome) -> None:
        """All prompts, which arrive together."""
        is_reference, num_open = not self._reference, len(self._prompts)
        seen: list[list[Tensor]] = [[] for _ in self._prompts]
        sampling = Sampling(max_tokens=self._answer_tokens)

        def submit(number: int, prompt: Sequence[int]) -> None:
            tokens, expected = list(prompt), [] if is_reference else self._reference[number]
            is_alike = True
            """Whether the answer's tokens are those of the reference so far: else what follows cannot be compared."""

            def on_token(new: NewToken) -> None:
                nonlocal is_alike
                token = new.token_id
                logits, index = self._model.take(tokens), len(tokens) - len(prompt)
                tokens.append(token)
                if is_reference:
                    seen[number].append(logits.clone())
                    return
                if is_alike:
                    self._compare(outcome, (number, index), logits, expected[index])
                is_alike = is_alike and token == int(expected[index].argmax())
                outcome.num_different_tokens += not is_alike

            def on_done(done: Completion) -> None:
                nonlocal num_open
                num_open -= 1
                outcome.num_tokens += len(done.token_ids)
                for tier, count in done.cached_by_tier.items():
                    outcome.counts[tier] = outcome.counts.get(tier, 0) + count
                self._on_prompt()

            engine.submit(prompt, sampling, MONOTONIC(), on_done, on_token)

        for number, prompt in enumerate(self._prompts):
            submit(number, prompt)
        engine.run_until(lambda: num_open == 0)
        if is_reference:
            self._reference = seen
            outcome.num_logits = outcome.num_tokens

    def _compare(self, outcome: Outcome, place: tuple[int, int], logits: Tensor, expected: Tensor) -> None:
        """:param place: which prompt, and which token of its answer follows these logits."""
        outcome.num_logits += 1
        if torch.equal(logits.view(torch.int32), expected.view(torch.int32)):
            return
        number, index = place
        token, expected_token = int(logits.argmax()), int(expected.argmax())
        difference = float((logits - expected).abs().max())
        outcome.num_different_logits += 1
        outcome.largest_difference = max(outcome.largest_difference, difference)
        if len(outcome.named) < _MOST_NAMED:
            words = "the same token" if token == expected_token else f"token {token} instead of {expected_token}"
            outcome.named.append(
                f"{outcome.condition}: prompt {number} of {len(self._prompts[number])} tokens, token {index} of its "
                f"answer: logits differ by up to {difference:.3g}; {words}"
            )


def _preemptions(registry: CollectorRegistry) -> int:
    return int(registry.get_sample_value("kvtier_engine_preemptions_total") or 0)
