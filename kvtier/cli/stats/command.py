"""The command `kvtier stats`: whom it asks, and what it does with the answers."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvtier.cli.options import Json, print_json
from kvtier.cli.stats.asking import Places
from kvtier.cli.stats.facts import Facts, facts_of
from kvtier.cli.stats.report import print_report
from kvtier.errors import KvtierError

ConfigFile = Annotated[
    Path | None, typer.Option(help="An engine's or a pool's TOML file: where they listen. Default: as without one.")
]
Urls = Annotated[
    list[str] | None,
    typer.Option(help="host:port or http(s) URL of an engine (vLLM's and SGLang's too) or of a pool. Repeatable."),
]
Ca = Annotated[Path | None, typer.Option(help="CAs in PEM for https; default: the file's, else the system's.")]
Token = Annotated[
    str | None,
    typer.Option(help="env:NAME or file:PATH of an operator's or observer's token, for pools that ask for one."),
]


def stats(
    config: ConfigFile = None,
    url: Urls = None,
    ca: Ca = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Is it helping? Hit rate by tier, bytes by path, how full, what was evicted, what failed.

    Asks the engine and the pool that the configuration names, whichever of them runs here (of a pool's file, which has
    [pool_service] and no tenant of its own, the pool alone); or those given by --url. Figures count from the start of
    each process; what is not told is left out, or a dash. Exit code 1 when nobody answers, or not all that --url names.

    Example: kvtier stats --url 127.0.0.1:8000 --url https://pool:7602 --ca ca.pem

    Example, of the hit rate alone: kvtier stats --json | jq '.sources[].hit_rate.share'
    """
    problems: list[str] = []
    answers: dict[str, Facts] = {}
    try:
        for heard in Places(config, url or (), ca, token).ask():
            facts = None if heard.samples is None else facts_of(heard.samples)
            if facts is not None:
                answers[heard.url] = facts
            elif heard.problem is not None:
                problems.append(heard.problem)
    except KvtierError as error:
        problems.append(str(error))
    if json:
        sources = [{"url": place, **plain(facts)} for place, facts in answers.items()]
        print_json({"sources": sources, "problems": problems})
    else:
        console = Console()
        for place, facts in answers.items():
            print_report(console, place, facts)
    if not answers or (url and problems):
        remedy = "" if url or config else "; name the file by --config, or addresses by --url"
        raise KvtierError("; ".join(problems) + remedy)


def plain(facts: Facts) -> dict[str, Any]:
    """Facts as what JSON has, with the hit rate's share, and a field by the name that it had first."""
    found = asdict(facts)
    found["hit_rate"]["share"] = facts.hit_rate.share
    found["ttft_mean_s"] = facts.first_token.all_s
    return found
