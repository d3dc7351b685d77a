"""`kvtier bench ttft`: time to first token of the engine, cold and warm, beside transformers' prefill."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from prometheus_client import CollectorRegistry

from kvtier.bench.report import Case, Spread, interleave, ratios, report
from kvtier.config import Config, parse_config
from kvtier.errors import KvtierError

if TYPE_CHECKING:
    from kvtier_engine.engine import Engine

PROMPT_TOKENS = 3_000
NEW_TOKENS = 40
"""Of a warm prompt: what follows the shared document."""


def bench_ttft(
    model: Annotated[Path | None, typer.Option(help="Hugging Face folder or GGUF file; default: SmolLM2-135M.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    threads: Annotated[int, typer.Option(help="Threads of both; 0 takes one per core.")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="Counted rounds.")] = 9,
    json: Annotated[Path | None, typer.Option(help="Write JSON to this file; - for standard output.")] = None,
) -> None:
    """Prefill 3,000 tokens in our engine and in transformers, same weights, dtype and threads, in turn; then
    the same prompt with 40 new tokens, the others cached on the device."""
    # Imported here, so that the command line does not load torch for other commands.
    from kvtier_engine.assemble import assembled_engine
    from kvtier_engine.demo_model import demo_model_path

    config = _config(model or demo_model_path(), dtype, threads)
    with assembled_engine(config) as assembled:
        prompts = _Prompts(assembled.model.config.vocab_size)
        first_token = _FirstToken(assembled.engine)
        bookkeeping = _Bookkeeping(assembled.registry)
        prefill = _transformers_prefill(assembled.model.weight_files[0].parent, dtype)
        cases: dict[str, Callable[[], None]] = {
            "cold": lambda: bookkeeping.of(lambda: first_token.wait_for(prompts.fresh(), num_cached=0)),
            "transformers": lambda: prefill(prompts.latest),
            "warm": lambda: first_token.wait_for(prompts.follow_up(), num_cached=PROMPT_TOKENS - NEW_TOKENS),
        }
        seconds = interleave(cases, rounds=rounds, label="ttft")
    rows = []
    for name, what in (
        ("cold", f"{PROMPT_TOKENS:,} tokens, nothing cached"),
        ("transformers", f"prefill of the same {PROMPT_TOKENS:,} tokens"),
        ("warm", f"{NEW_TOKENS} new tokens after {PROMPT_TOKENS - NEW_TOKENS:,} on the device"),
    ):
        ratio = ratios(seconds["transformers"], seconds[name])
        spread = f"{ratio.min_s:.2f} .. {ratio.max_s:.2f}"
        median_us = Spread.of(seconds[name]).median_s * 1e6
        rows.append(Case(name, what, median_us, "prompt", "transformers", ratio.median_s, spread))
    note = (
        "At zero hits, hashing, lookup, allocation and the rest of the cache's bookkeeping take "
        f"{bookkeeping.share:.2%} of the engine's step time."
    )
    report(f"Time to first token, {dtype}", rows, as_json=json, notes=[note])


class _Prompts:
    """Random tokens, so that nothing is cached that is not meant to be."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._random = random.Random(0)
        self.latest: list[int] = []

    def fresh(self) -> list[int]:
        self.latest = self._draw(PROMPT_TOKENS)
        return self.latest

    def follow_up(self) -> list[int]:
        """The latest document with another question."""
        return self.latest[: PROMPT_TOKENS - NEW_TOKENS] + self._draw(NEW_TOKENS)

    def _draw(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(self._vocab_size) for _ in range(num_tokens)]


class _FirstToken:
    """Asks an engine for one token and waits."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine

    def wait_for(self, tokens: list[int], *, num_cached: int) -> None:
        from kvtier.clock import MONOTONIC
        from kvtier_engine.request import Completion, Sampling

        completions: list[Completion] = []
        self._engine.submit(tokens, Sampling(max_tokens=1), MONOTONIC(), completions.append)
        self._engine.run_until(lambda: bool(completions))
        cached = sum(completions[0].cached_by_tier.values())
        if completions[0].finish_reason != "length" or cached != num_cached:
            raise KvtierError(f"the engine ended with {completions[0]}: expected {num_cached} cached tokens")


def _config(model: Path, dtype: str, threads: int) -> Config:
    engine: dict[str, Any] = {"model": str(model.resolve()), "dtype": dtype, "num_threads": threads}
    return parse_config(
        {
            "tenant": "bench",
            "tenants": {"bench": {"secret": "env:BENCH_SECRET"}},
            "engine": engine | {"kv_bytes": "2GiB"},
            "host": {"capacity_bytes": "512MiB"},
            "cache": {"clean_ahead_blocks": 0},
        },
        source="kvtier bench ttft",
        environ={"BENCH_SECRET": "of a benchmark, shared with nobody"},
    )


def _transformers_prefill(folder: Path, dtype: str) -> Callable[[list[int]], None]:
    try:
        import torch
        import transformers
    except ModuleNotFoundError as error:
        raise KvtierError(f"the comparison needs {error.name}: pip install 'kvtier[engine,dev]'") from error
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))

    def prefill(tokens: list[int]) -> None:
        with torch.inference_mode():
            model(torch.tensor([tokens]), logits_to_keep=1)

    return prefill


class _Bookkeeping:
    """What the cache costs the engine's thread, by the engine's own timers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._cache_s = self._step_s = 0.0

    def of(self, run: Callable[[], None]) -> None:
        """Runs, and adds what it took."""
        cache_s, step_s = self._read("cache"), self._read("step")
        run()
        self._cache_s += self._read("cache") - cache_s
        self._step_s += self._read("step") - step_s

    @property
    def share(self) -> float:
        return self._cache_s / self._step_s

    def _read(self, what: str) -> float:
        return self._registry.get_sample_value(f"kvtier_engine_{what}_seconds_total") or 0.0
