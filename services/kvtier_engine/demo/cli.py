"""`kvtier demo`: run, compare, report."""

import json as json_module
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvtier.cli.options import Plot, writable
from kvtier.errors import KvtierError
from kvtier.system.machine import commit, hardware
from kvtier.system.working_folder import working_folder
from kvtier_engine.demo.demo_model import demo_model_path
from kvtier_engine.demo.plot import write_plot
from kvtier_engine.demo.runs import Run, Stage, judge, run_all, shared_prefix

_NUM_STAGES = 6
_MIN_CACHED_SHARE = 0.95


def demo(
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.", callback=writable)] = None,
    plot: Plot = None,
    model: Annotated[Path | None, typer.Option(help="Model folder or GGUF file; default: SmolLM2-135M.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
) -> None:
    """Two engine processes share one KV cache through the pool; a second tenant hits nothing.

    Example: kvtier demo --json demo.json --plot demo.svg
    """
    console = Console()
    model_path = model or demo_model_path()
    with (
        working_folder("kvtier-demo-") as folder,
        Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as progress,
    ):
        task = progress.add_task("Starting the cache pool (memory and disk)", total=_NUM_STAGES)

        def note(text: str) -> None:
            progress.update(task, description=text, advance=1)

        stage = Stage.prepare(folder, model_path, dtype)
        with stage.pool() as pool:
            address = pool.ready()["block"]
            runs = run_all(stage, address, note)
            identical, judged_in = _tokens_identical(runs), dtype
            if not identical and dtype != "float32":
                # Prefill in other chunks rounds differently in bfloat16, which may flip a near tie between
                # two tokens. float32 tells such a flip from a wrong byte.
                note("A token differs; judging again in float32")
                again = shared_prefix(stage, "f32-", address, "float32", note)
                again += again[:1] + judge(stage, "f32-judge", "float32", note)
                identical, judged_in = _tokens_identical(again), "float32"
    summary = _summary(runs, identical, judged_in)
    _print(console, runs, summary)
    if json is not None:
        json.write_text(json_module.dumps(summary, indent=2) + "\n")
    if plot is not None:
        _plot(plot, runs)
    problems = _problems(summary)
    if problems:
        raise KvtierError(f"the demo failed: {'; '.join(problems)}")


def _problems(summary: dict[str, Any]) -> list[str]:
    """What must hold wherever the demo runs; its speed is for the reader to judge."""
    problems = []
    if not summary["tokens_identical"]:
        problems.append("answers differ from those without a cache")
    if summary["other_tenant_cached_tokens"]:
        problems.append("a tenant was served another's KV")
    if summary["cached_share_pool"] < _MIN_CACHED_SHARE:
        problems.append(f"only {summary['cached_share_pool']:.1%} of the shared prefix came from the cache")
    return problems


def _tokens_identical(runs: list[Run]) -> bool:
    """Whether every answer equals the one to the same question without a cache."""
    cold, pool, device, other, judge_first, judge_second = (run.answer_token_ids for run in runs)
    return cold == other == judge_first and pool == device == judge_second


def _shared_prefix_tokens(one: Run, other: Run) -> int:
    pairs = zip(one.prompt_token_ids, other.prompt_token_ids, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(one.prompt_tokens, other.prompt_tokens))


def _summary(runs: list[Run], identical: bool, judged_in: str) -> dict[str, Any]:
    cold, pool, device, other = runs[:4]
    shared = _shared_prefix_tokens(cold, pool)
    return {
        "hardware": hardware(),
        "commit": commit(),
        "runs": [{k: v for k, v in asdict(run).items() if k != "prompt_token_ids"} for run in runs],
        "speedup_pool": cold.ttft_s / pool.ttft_s,
        "speedup_device": cold.ttft_s / device.ttft_s,
        "shared_prefix_tokens": shared,
        "cached_share_pool": pool.cached_tokens / shared,
        "tokens_identical": identical,
        "judged_in": judged_in,
        "other_tenant_cached_tokens": other.cached_tokens,
    }


def _print(console: Console, runs: list[Run], summary: dict[str, Any]) -> None:
    table = Table(title="One document, two questions")
    for column in ("run", "TTFT", "prompt", "cached tokens", "speed-up", "answer"):
        table.add_column(column, justify="left" if column in ("run", "answer") else "right")
    for run in runs:
        tiers = ", ".join(f"{count:,} {tier}" for tier, count in run.cached_by_tier.items() if count) or "0"
        speedup = f"{runs[0].ttft_s / run.ttft_s:.1f}x"
        table.add_row(run.name, f"{run.ttft_s * 1000:,.0f} ms", f"{run.prompt_tokens:,}", tiers, speedup, run.answer)
    console.print(table)
    console.print(
        f"Pool hit: {summary['speedup_pool']:.1f}x faster to the first token than computing, with "
        f"{summary['cached_share_pool']:.1%} of the shared {summary['shared_prefix_tokens']:,} tokens from the pool.\n"
        f"Device hit: {summary['speedup_device']:.1f}x. "
        f"Tokens identical to those without a cache: {'yes' if summary['tokens_identical'] else 'NO'} "
        f"(judged in {summary['judged_in']}). "
        f"Tokens that the other tenant got from the cache: {summary['other_tenant_cached_tokens']}."
    )


def _plot(path: Path, runs: list[Run]) -> None:
    rows = []
    for run in runs:
        tier = max(run.cached_by_tier, key=lambda t: run.cached_by_tier[t], default="")
        rows.append((run.name, run.ttft_s, run.cached_tokens, tier if run.cached_tokens else ""))
    title = f"Time to first token, {runs[0].prompt_tokens:,}-token prompt"
    write_plot(path, rows, title=title, caption=f"{hardware()}, commit {commit()}")
