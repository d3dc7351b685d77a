"""`kvtier bench windows`: what a conversation of many windows takes of the device, and of a load, by KV groups."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.cli.options import Json
from kvtier.clock import MONOTONIC
from kvtier.config import Config, parse_config
from kvtier.errors import KvtierError
from kvtier_bench.measuring.blocks import TENANT
from kvtier_bench.measuring.report import Case, Spread, report
from kvtier_bench.measuring.rounds import NUM_ROUNDS, progress

if TYPE_CHECKING:
    from kvtier_engine.model.kv_groups import KVGroups
    from kvtier_engine.model.model_config import ModelConfig
    from kvtier_engine.model.paged_kv import PagedKV
    from kvtier_engine.scheduling.engine import Engine

_ONE, _GROUPS = "one group", "KV groups"
_TOKENS_PER_BLOCK, _WINDOW = 16, 512
_NEW_TOKENS, _ANSWER_TOKENS = 64, 32
_MB = 1e6


@dataclass(slots=True)
class _Measured:
    """What a layout took, round by round. Bytes are of the device's blocks that were held, or brought there."""

    cold_s: list[float] = field(default_factory=list)
    hit_s: list[float] = field(default_factory=list)
    most_bytes: list[int] = field(default_factory=list)
    """The most while a prompt was computed and answered."""
    answering_bytes: list[int] = field(default_factory=list)
    """The least when the answer had begun."""
    loaded_bytes: list[int] = field(default_factory=list)


def bench_windows(
    windows: Annotated[int, typer.Option(min=1, help="Windows of 512 tokens that a conversation has.")] = 8,
    threads: Annotated[int, typer.Option(help="Threads of a forward pass; 0 takes one per core.")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="Counted rounds.")] = NUM_ROUNDS,
    json: Json = False,
) -> None:
    """Serve conversations with KV of Gemma 3 1B: a token's in all 26 layers under one key, and in KV groups.

    Weights are random and small, since blocks and bytes do not depend on them. The device has room for one conversation
    as each layout needs it, so that a conversation that another one has followed comes from host memory.
    """
    # Imported here, so that the command line does not load torch for other commands.
    from kvtier_engine.model.kv_groups import ONE_GROUP, KVGroups

    config, num_tokens = _gemma_3_1b(), windows * _WINDOW
    measured = {name: _Measured() for name in (_ONE, _GROUPS)}
    with ExitStack() as stack:
        sides = {
            name: _Side(stack, config, groups, num_tokens, threads, measured[name])
            for name, groups in {_ONE: ONE_GROUP, _GROUPS: KVGroups.of(config)}.items()
        }
        advance = stack.enter_context(progress("rounds", rounds))
        for side in sides.values():
            side.begin()
        for number in range(rounds):
            for name in list(sides)[:: -1 if number % 2 else 1]:
                sides[name].serve()
            advance()
    report(
        f"Conversations of {num_tokens:,} tokens, {windows} windows, KV of Gemma 3 1B in bfloat16",
        [case for op in ("nothing cached", "from host memory") for case in _cases(op, measured)],
        as_json=json,
        columns={"most MB": "most_mb", "answering": "answering_mb", "loaded": "loaded_mb"},
    )


class _Side:
    """An engine with one layout of its KV. The process's first thread only."""

    def __init__(
        self,
        stack: ExitStack,
        config: "ModelConfig",
        groups: "KVGroups",
        num_tokens: int,
        threads: int,
        into: _Measured,
    ) -> None:
        import torch
        from prometheus_client import CollectorRegistry

        from kvtier.system.cores import usable_cores
        from kvtier_bench.cases.first_token import Prompts
        from kvtier_bench.measuring.random_model import random_weights
        from kvtier_engine.assemble import engine_of
        from kvtier_engine.model.llama import LlamaModel
        from kvtier_engine.model.paged_kv import allocate_kv, kv_namespace

        torch.set_num_threads(threads or usable_cores())
        room = num_tokens + _ANSWER_TOKENS
        num_blocks = next(n for n in range(1, room) if groups.room(n, _TOKENS_PER_BLOCK) >= room)
        self._kv: PagedKV = allocate_kv(config, num_blocks, _TOKENS_PER_BLOCK, torch.bfloat16, groups=groups)
        model = LlamaModel(config, random_weights(config, torch.bfloat16, torch.device("cpu")))
        namespace = kv_namespace(config, bytes(32), torch.bfloat16, groups=groups)
        self._registry: CollectorRegistry = CollectorRegistry()
        settings = _settings(host_bytes=3 * num_blocks * (1 + groups.num_windowed) * self._kv.block_bytes)
        self._engine: Engine = stack.enter_context(
            engine_of(settings, model, config, self._kv, namespace, self._registry)
        )
        self._prompts = Prompts(config.vocab_size, prompt_tokens=num_tokens, new_tokens=_NEW_TOKENS)
        self._num_cached = num_tokens - _NEW_TOKENS
        self._into = into

    def begin(self) -> None:
        """The first conversation, which is not counted."""
        self._ask(self._prompts.fresh())

    def serve(self) -> None:
        """A new conversation, and then a follow-up to the one before it, of which the device has kept nothing."""
        follow_up, into = self._prompts.follow_up(), self._into
        cold_s, _ = self._ask(self._prompts.fresh())
        before = self._num_loaded
        hit_s, found = self._ask(follow_up)
        if found != {"host": self._num_cached}:
            raise KvtierError(f"the engine found {found} cached tokens: expected all {self._num_cached} in host memory")
        into.cold_s.append(cold_s)
        into.hit_s.append(hit_s)
        into.loaded_bytes.append((self._num_loaded - before) * self._kv.block_bytes)

    def _ask(self, tokens: list[int]) -> tuple[float, dict[str, int]]:
        from kvtier_engine.scheduling.completion import Completion, NewToken
        from kvtier_engine.scheduling.sampling_params import Sampling

        done, held, answering = list[Completion](), list[int](), list[int]()
        answered: list[NewToken] = []

        def is_over() -> bool:
            held.append((self._kv.num_blocks - self._engine.num_free_blocks) * self._kv.block_bytes)
            if answered and not done:
                answering.append(held[-1])
            return bool(done)

        self._engine.submit(tokens, Sampling(max_tokens=_ANSWER_TOKENS), MONOTONIC(), done.append, answered.append)
        self._engine.run_until(is_over)
        self._into.most_bytes.append(max(held))
        self._into.answering_bytes.append(min(answering))
        return done[0].ttft_s or 0.0, dict(done[0].cached_by_tier)

    @property
    def _num_loaded(self) -> int:
        return int(self._registry.get_sample_value("kvtier_loaded_blocks_total", {"tier": "host"}) or 0)


def _cases(op: str, measured: Mapping[str, _Measured]) -> list[Case]:
    is_hit = op == "from host memory"
    ttft_s = {name: of.hit_s if is_hit else of.cold_s for name, of in measured.items()}
    return [
        Case.of_rounds(
            name,
            op,
            ttft_s[name],
            floor=(_ONE, ttft_s[_ONE]),
            unit="TTFT",
            figures={
                "most_mb": max(of.most_bytes) / _MB,
                "answering_mb": Spread.of(of.answering_bytes).median_s / _MB,
                **({"loaded_mb": Spread.of(of.loaded_bytes).median_s / _MB} if is_hit else {}),
            },
        )
        for name, of in measured.items()
    ]


def _gemma_3_1b() -> "ModelConfig":
    """Its layers and the sizes of its KV; all else is small."""
    from kvtier_engine.model.model_config import ModelConfig

    return ModelConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=26,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32_768,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=None,
        tie_word_embeddings=False,
        eos_token_ids=(),
        sliding_window=_WINDOW,
        windowed_layers=tuple((layer + 1) % 6 != 0 for layer in range(26)),
    )


def _settings(*, host_bytes: int) -> Config:
    return parse_config(
        {
            "tenant": TENANT,
            "tenants": {TENANT: {"secret": "env:BENCH_SECRET"}},
            "cache": {"fetch": "always", "tokens_per_block": _TOKENS_PER_BLOCK},
            "host": {"capacity_bytes": host_bytes},
        },
        source="kvtier bench windows",
        environ={"BENCH_SECRET": "of a benchmark, shared with nobody"},
    )
