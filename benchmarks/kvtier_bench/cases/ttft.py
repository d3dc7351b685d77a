"""`kvtier bench ttft`: time to first token of the engine, cold and warm, beside transformers' prefill."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from prometheus_client import CollectorRegistry

from kvtier.cli.options import Json, Plot
from kvtier.config import Config, parse_config
from kvtier.errors import KvtierError
from kvtier.system.working_folder import working_folder
from kvtier_bench.measuring.blocks import TENANT
from kvtier_bench.measuring.report import Case, report
from kvtier_bench.measuring.rounds import NUM_ROUNDS, Subject, in_turn, timed
from kvtier_bench.processes.pool_process import PoolProcess, pool_process

PROMPT_TOKENS = 3_000
NEW_TOKENS = 40
"""Tokens of a warm prompt that follow the shared document."""
_POOL_BYTES = 2 << 30


def bench_ttft(
    model: Annotated[Path | None, typer.Option(help="Hugging Face folder or GGUF file; default: SmolLM2-135M.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    threads: Annotated[int, typer.Option(help="Threads of both; 0 takes one per core.")] = 0,
    io_process: Annotated[bool, typer.Option(help="As cache.io_process.")] = True,
    rounds: Annotated[int, typer.Option(min=1, help="Counted rounds.")] = NUM_ROUNDS,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Prefill 3,000 tokens in our engine and in transformers, same weights, dtype and threads, in turn; then the
    same prompt with 40 new tokens, the others cached on the device, and again from a pool on the same machine."""
    # Imported here, so that the command line does not load torch for other commands.
    from kvtier_bench.cases.first_token import FirstToken, Prompts
    from kvtier_engine.assemble import assembled_engine
    from kvtier_engine.demo.demo_model import demo_model_path

    with working_folder() as folder, ExitStack() as stack:
        pool = stack.enter_context(pool_process(folder, _POOL_BYTES))
        config = _config(model or demo_model_path(), dtype, threads, pool, io_process)
        assembled = stack.enter_context(assembled_engine(config))
        prompts = Prompts(assembled.model.config.vocab_size, prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS)
        first_token = FirstToken(assembled.engine, assembled.registry)
        bookkeeping = _Bookkeeping(assembled.registry)
        prefill = _transformers_prefill(assembled.model.weight_files[0].parent, dtype)

        def cold() -> None:
            bookkeeping.of(lambda: first_token.wait_for(prompts.fresh(), {}))

        def warm(tier: str) -> Callable[[], None]:
            return lambda: first_token.wait_for(prompts.follow_up(), {tier: PROMPT_TOKENS - NEW_TOKENS})

        subjects = {
            "cold": Subject(timed(cold)),
            "transformers": Subject(timed(lambda: prefill(prompts.latest))),
            "device": Subject(timed(warm("device")), first_token.settle),
            "pool": Subject(timed(warm("pool")), first_token.leave_to_the_pool),
        }
        samples = in_turn(subjects, rounds=rounds, label="ttft")
    cases = []
    for name, op in (
        ("cold", f"{PROMPT_TOKENS:,} tokens, nothing cached"),
        ("transformers", f"prefill of the same {PROMPT_TOKENS:,} tokens"),
        ("device", f"{NEW_TOKENS} new tokens after {PROMPT_TOKENS - NEW_TOKENS:,} on the device"),
        ("pool", f"{NEW_TOKENS} new tokens after {PROMPT_TOKENS - NEW_TOKENS:,} in the pool"),
    ):
        floor = "device" if name == "pool" else "transformers"
        cases.append(Case.of(name, op, samples[name], floor=(floor, samples[floor]), unit="prompt"))
    note = (
        "At zero hits, hashing, lookup, allocation and the rest of the cache's bookkeeping take "
        f"{bookkeeping.share:.2%} of the engine's step time."
    )
    report(f"Time to first token, {dtype}", cases, as_json=json, plot=plot, notes=[note])


def _config(model: Path, dtype: str, threads: int, pool: PoolProcess, io_process: bool) -> Config:
    engine: dict[str, Any] = {"model": str(model.resolve()), "dtype": dtype, "num_threads": threads}
    return parse_config(
        {
            "tenant": TENANT,
            "tenants": {TENANT: {"secret": "env:BENCH_SECRET", "token": "env:BENCH_TOKEN"}},
            "engine": engine | {"kv_bytes": "2GiB"},
            "host": {"capacity_bytes": "512MiB"},
            "cache": {"clean_ahead_blocks": 0, "io_process": io_process, "fetch": "always"},
            "pool": {"address": pool.unix},
        },
        source="kvtier bench ttft",
        environ={"BENCH_SECRET": "of a benchmark, shared with nobody", "BENCH_TOKEN": pool.token},
    )


def _transformers_prefill(folder: Path, dtype: str) -> Callable[[list[int]], None]:
    try:
        import torch
        import transformers
    except ModuleNotFoundError as error:
        raise KvtierError(
            f"the comparison needs {error.name}: in a checkout of kvtier, pip install '.[engine,dev]'"
        ) from error
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
