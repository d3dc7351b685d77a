"""`kvtier bench vllm`: the command. Imports nothing of vLLM: engines are processes of their own."""

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.options import Json, Plot
from kvtier.errors import KvtierError
from kvtier.system.working_folder import working_folder
from kvtier_bench.measuring.report import report
from kvtier_bench.processes.peers import CHECKOUT
from kvtier_bench.processes.pool_process import pool_process
from kvtier_bench.vllm import throughput, ttft
from kvtier_bench.vllm.contenders import OWN_HIT, contenders, named, shared_memory_removed
from kvtier_bench.vllm.session import Session

_NUM_ROUNDS = 10
_POOL_BYTES = 1 << 30


def bench_vllm(
    json: Json = False,
    plot: Plot = None,
    rounds: Annotated[int, typer.Option(min=1, help="Counted rounds.")] = _NUM_ROUNDS,
    peers: Annotated[
        Path | None, typer.Option(help="Where `make peers` has prepared what to run beside; default: .venv/peers.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Folder of a safetensors model; default: SmolLM2-135M.", exists=True)
    ] = None,
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of the shared document.")] = 3_000,
    threads: Annotated[int, typer.Option(min=0, help="Threads of each engine's model; 0: one per core.")] = 0,
    only: Annotated[list[str] | None, typer.Option(help="These rows of the first table; may be repeated.")] = None,
    with_throughput: Annotated[bool, typer.Option("--throughput/--no-throughput", help="The second table.")] = True,
) -> None:
    """Ask vLLM engines on the CPU short questions about a long document, in turn: without any cache, with vLLM's own,
    with kvtier's tiers, and with the connectors that vLLM brings. Then unrelated prompts: what saving costs.

    Each question has to hit where its row says, by the engine's counters, or there is no report.
    """
    require_vllm()
    with working_folder() as folder, shared_memory_removed(folder), pool_process(folder, _POOL_BYTES) as pool:
        chosen = named(contenders(pool, folder), [*only, OWN_HIT] if only else [])
        session = Session(folder, model or _demo_model(folder), pool, peers or CHECKOUT / ".venv" / "peers", threads)
        cases, notes = ttft.measure(session, chosen, tokens, rounds)
        if with_throughput:
            more_cases, more_notes = throughput.measure(session, rounds)
            cases, notes = cases + more_cases, notes + more_notes
    # After the engines have gone: what they took of memory is free when figures are drawn.
    report("vLLM on the CPU", cases, as_json=json, plot=plot, notes=[_versions(session), *notes])


def require_vllm() -> None:
    """Raises `KvtierError` if vLLM is not installed beside kvtier."""
    if importlib.util.find_spec("vllm") is None:
        raise KvtierError(
            "vLLM is not installed where this kvtier is: make .venv/vllm prepares an environment that has both, "
            "then .venv/vllm/bin/kvtier bench vllm"
        )


def _demo_model(folder: Path) -> Path:
    # Imported here: they load numpy and gguf, which other commands do without.
    from kvtier_engine.demo.demo_model import demo_model_path
    from kvtier_engine.model.gguf_import import import_gguf

    return import_gguf(demo_model_path(), folder / "models")


def _versions(session: Session) -> str:
    installed = importlib.metadata.packages_distributions()["vllm"][0]
    threads = {0: "a thread per core", 1: "one thread"}.get(session.threads, f"{session.threads} threads")
    return (
        f"{installed} {importlib.metadata.version(installed)}, bfloat16, blocks of 32 tokens, eager; each engine one "
        f"process with {threads}, which idles while others are asked."
    )
