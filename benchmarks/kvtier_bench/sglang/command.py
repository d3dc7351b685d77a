"""`kvtier bench sglang`: the command."""

import importlib.metadata
import importlib.util
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.cli.options import Json, Plot
from kvtier.errors import KvtierError
from kvtier.memory.malloc import keep_freed_memory
from kvtier.system.working_folder import working_folder
from kvtier_bench.measuring.blocks import NUM_SLOTS, TENANT, Rotation
from kvtier_bench.measuring.options import Rounds
from kvtier_bench.measuring.report import Case, report
from kvtier_bench.measuring.rounds import NUM_ROUNDS, Samples, Subject, in_turn, ratios
from kvtier_bench.processes.pool_process import PoolProcess, pool_process

_FILES, _OURS, _MEMCPY = "HiCacheFile", "kvtier", "memcpy"
_BARS = {"write": 2.0, "read": 1.0}
"""Times as fast as SGLang's files, at the least."""
_SECRET, _TOKEN = "BENCH_SECRET", "BENCH_TOKEN"
_ROOM = 4
"""Memory of the pool, in prompts."""


def bench_sglang(
    json: Json = False,
    plot: Plot = None,
    rounds: Rounds = NUM_ROUNDS,
    pages: Annotated[int, typer.Option(min=NUM_SLOTS, help="Pages of 2 MiB in a prompt.")] = NUM_SLOTS,
    layout: Annotated[str, typer.Option(help="Layout of the host pool: --hicache-mem-layout.")] = "page_first",
    files: Annotated[
        Path | None, typer.Option(help="Where HiCacheFile makes its folder; default: the system's temporary folder.")
    ] = None,
) -> None:
    """Write a prompt of 64 pages through SGLang's controller into a pool and, in turn, into its own files; read it.

    A write is timed from the controller's queue to its answer, a read with the lookup before it. Before each write the
    storage forgets the prompt; files stay in the page cache. Every byte that is read is compared, between the rounds.
    """
    _require_sglang()
    import torch

    from kvtier_bench.sglang import absent_torchvision  # noqa: F401  (before SGLang)
    from kvtier_bench.sglang.controller import PAGE_BYTES, controller

    keep_freed_memory()
    torch.set_num_threads(1)
    with working_folder() as folder, ExitStack() as stack:
        pool = stack.enter_context(pool_process(folder, max(256 << 20, _ROOM * pages * PAGE_BYTES)))
        file_folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=files))
        storages = {_FILES: ("file", {"file_storage_path": file_folder}), _OURS: ("dynamic", _ours(pool))}
        running = {
            name: stack.enter_context(controller(name, backend, extra, layout=layout, num_pages=pages))
            for name, (backend, extra) in storages.items()
        }
        pids = {_FILES: (os.getpid(),), _OURS: (os.getpid(), pool.pid)}
        memcpy = Subject(Rotation(PAGE_BYTES, pages).copies)
        cases, notes = [], [_versions(layout)]
        for op in ("write", "read"):
            steps = {
                name: (each.write, each.forget) if op == "write" else (each.read, each.poison)
                for name, each in running.items()
            }
            subjects = {name: Subject(run, prepare, pids[name]) for name, (run, prepare) in steps.items()}
            samples = in_turn({_MEMCPY: memcpy, **subjects}, rounds=rounds, label=op)
            for each in running.values():
                each.require_equal()
            cases += [_case(name, op, samples, pages, PAGE_BYTES) for name in samples]
            notes.append(_verdict(op, samples))
    report("SGLang's HiCache", cases, as_json=json, plot=plot, notes=notes)


def _require_sglang() -> None:
    if importlib.util.find_spec("sglang") is None:
        raise KvtierError(
            "SGLang is not installed where this kvtier is: make .venv/sglang prepares an environment that has both, "
            "then .venv/sglang/bin/kvtier bench sglang"
        )


def _ours(pool: PoolProcess) -> dict[str, Any]:
    """What users give as the backend's extra config."""
    os.environ |= {_SECRET: "of a benchmark, shared with nobody", _TOKEN: pool.token}
    return {
        "backend_name": "kvtier",
        "module_path": "kvtier_sglang",
        "class_name": "KvtierStorage",
        "interface_v1": 1,
        "model_revision": "bench",
        "tenant": TENANT,
        "tenants": {TENANT: {"secret": f"env:{_SECRET}", "token": f"env:{_TOKEN}"}},
        "pool": {"address": [pool.unix]},
    }


def _case(name: str, op: str, samples: dict[str, Samples], pages: int, page_bytes: int) -> Case:
    return Case.of(
        name,
        op,
        samples[name],
        floor=(_FILES, samples[_FILES]) if name == _OURS else None,
        beside={_MEMCPY: samples[_MEMCPY]} if name != _MEMCPY else {},
        round_bytes=pages * page_bytes,
        payload_bytes=page_bytes,
        batch=pages,
        unit="page" if name == _MEMCPY else "prompt",
    )


def _verdict(op: str, samples: dict[str, Samples]) -> str:
    times, bar = ratios(samples[_FILES].rounds_s, samples[_OURS].rounds_s), _BARS[op]
    return (
        f"{op}: {times.median_s:.2f} times as fast as {_FILES} ({times.min_s:.2f} .. {times.max_s:.2f}); it is to be "
        f"{bar:.1f} at least: {'met' if times.median_s >= bar else 'not met'}."
    )


def _versions(layout: str) -> str:
    return f"sglang {importlib.metadata.version('sglang')}, bfloat16, pages of 64 tokens, host pool {layout}."
