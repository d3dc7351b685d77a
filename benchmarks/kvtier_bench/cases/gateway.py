"""`kvtier bench gateway`: streamed requests through the gateway, beside a plain proxy of the same framework."""

import asyncio
import contextlib
import hashlib
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.options import Json, Plot
from kvtier.errors import KvtierError
from kvtier.system.processes import Service
from kvtier.system.working_folder import working_folder
from kvtier_bench.cases.gateway_adds import added_cases
from kvtier_bench.cases.gateway_memory import memory_cases
from kvtier_bench.measuring.options import Rounds
from kvtier_bench.measuring.report import Case, report
from kvtier_bench.measuring.rounds import NUM_ROUNDS, Subject, in_turn, process_clock
from kvtier_bench.processes.http_process import MODEL, NUM_EVENTS
from kvtier_gateway.routing.registry import make_strategy
from kvtier_gateway.routing.values import Reads

PROXY = "plain proxy"
_PATH = "/v1/chat/completions"
_BODY = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "word " * 1000}]}


def bench_gateway(
    json: Json = False,
    plot: Plot = None,
    rounds: Rounds = NUM_ROUNDS,
    requests: Annotated[int, typer.Option(min=10, help="Streamed requests in a round.")] = 500,
    concurrency: Annotated[int, typer.Option(min=1, help="Streams at a time.")] = 32,
    prefixes: Annotated[
        int, typer.Option(min=0, help="Distinct prompts whose memory is measured; 0: none.")
    ] = 1_000_000,
    calls: Annotated[int, typer.Option(min=3, help="Requests that are timed by themselves, of each size.")] = 300,
    strategy: Annotated[str, typer.Option(help="The gateway's strategy.")] = "priced",
) -> None:
    """Stream 500 requests of 1,000 words in turn through the gateway and through a plain proxy; measure what it adds.

    What it adds to a request is timed by itself, with 64 and with 8,192 keys, and before many engines: reading,
    cleaning, tokens of a conversation that grows, keys, the pool's answer, the choice; beside parsing the body, hashing
    its blocks and looking them up. Only for strategies that go by keys. And the memory that a million distinct prompts
    take.
    """
    with working_folder() as folder:
        cases = _streamed(folder, rounds, requests, concurrency, strategy)
        if make_strategy(strategy).reads is Reads.KEYS:
            cases += added_cases(folder, strategy, calls)
    if prefixes:
        cases += memory_cases(prefixes, strategy)
    notes = [note for case in cases if (note := _note(case))]
    report("The gateway", cases, as_json=json, plot=plot, notes=notes)


def _note(case: Case) -> str:
    return f"{case.name}, {case.op}: {case.detail}" if case.detail else ""


def _streamed(folder: Path, rounds: int, requests: int, concurrency: int, strategy: str) -> list[Case]:
    key = secrets.token_hex(16)
    with _helper("engine") as (_, engine), _helper("proxy", engine) as (proxy_pid, proxy):
        config = folder / "gateway.toml"
        config.write_text(
            f'[gateway]\nlisten = "127.0.0.1:0"\nstatus_listen = "127.0.0.1:0"\nengines = ["{engine}"]\n'
            f'strategy = "{strategy}"\n[tenants.red]\n[api_keys.bench]\ntenant = "red"\n'
            f'key_sha256 = ["{hashlib.sha256(key.encode()).hexdigest()}"]\n'
        )
        log = folder / "gateway.log"
        with Service(["gateway", "serve", "--config", str(config)], log=log, environ={}) as service:
            gateway = service.ready()["url"]
            subjects = {
                name: Subject(
                    lambda url=url: asyncio.run(_round(url, key, requests, concurrency)),  # type: ignore[misc]
                    pids=(pid,),
                )
                for name, url, pid in ((PROXY, proxy, proxy_pid), ("gateway", gateway, service.process.pid))
            }
            samples = in_turn(subjects, rounds=rounds, label="streams")
    cases = []
    for name, of in samples.items():
        per_core = requests * len(of.rounds_s) / of.cpu_s
        figures = {
            "requests_per_cpu_s": per_core,
            "requests_per_s": requests / sorted(of.rounds_s)[len(of.rounds_s) // 2],
        }
        if name != PROXY:
            figures["ratio_of_requests_per_cpu_s"] = samples[PROXY].cpu_s / of.cpu_s
        detail = ", ".join(f"{value:,.2f} {figure.replace('_', ' ')}" for figure, value in figures.items())
        cases.append(
            Case.of(
                name,
                f"{requests} streams of {NUM_EVENTS} events",
                of,
                floor=(PROXY, samples[PROXY]),
                detail=detail,
                figures=figures,
                unit="round",
            )
        )
    return cases


async def _round(url: str, key: str, requests: int, concurrency: int) -> Sequence[float]:
    """Seconds of all requests together."""
    import aiohttp

    left = iter(range(requests))

    async def ask(session: aiohttp.ClientSession) -> None:
        for _ in left:
            async with session.post(url + _PATH, json=_BODY) as response:
                answer = await response.read()
                if response.status != 200 or not answer.endswith(b"[DONE]\n\n"):
                    raise KvtierError(f"{url} answers {response.status}: {answer[:200]!r}")

    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        begun_s = time.perf_counter()
        await asyncio.gather(*(ask(session) for _ in range(concurrency)))
        return [time.perf_counter() - begun_s]


@contextlib.contextmanager
def _helper(*arguments: str) -> Iterator[tuple[int, str]]:
    """A process of `http_process`: its pid, and where it serves."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtier_bench.processes.http_process", *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("ready url="):
            raise KvtierError(f"the {arguments[0]} beside the gateway did not start")
        process_clock(process.pid)
        yield process.pid, line.removeprefix("ready url=").strip()
    finally:
        process.terminate()
        process.communicate()
