"""The command `kvtier stats`: where to ask, and how the answer is printed."""

import json as json_module
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvtier.cli.stats.facts import CodecFacts, Facts, PathFacts, TierFacts, facts_of
from kvtier.cli.stats.samples import fetch, metrics_url, reachable
from kvtier.config import Config, load_config, parse_config
from kvtier.errors import KvtierError, UnavailableError
from kvtier.events import TierState

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def stats(
    config: Annotated[
        Path | None, typer.Option(help="An engine's or a pool's TOML file: where they listen. Default: as without one.")
    ] = None,
    url: Annotated[
        list[str] | None,
        typer.Option(help="host:port or http(s) URL of an engine or of a pool's http_listen. Repeatable."),
    ] = None,
    ca: Annotated[
        Path | None, typer.Option(help="CAs in PEM for https; default: the file's, else the system's.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Is it helping? Hit rate by tier, bytes by path, how full, what was evicted, what failed.

    Asks the engine and the pool that the configuration names, whichever of them runs here; or those given by --url.
    Figures count from the start of each process. Exit code 1 when nobody answers.
    """
    settings = load_config(config) if config is not None else parse_config({}, source="environment")
    answers: dict[str, Facts] = {}
    problems: list[str] = []
    for place in _named(url) or _configured(settings):
        try:
            facts = facts_of(fetch(place, ca=ca or _ca_of(settings)))
        except UnavailableError as error:
            problems.append(str(error))
            continue
        if facts is None:
            problems.append(f"{place} is neither an engine nor a pool: it has none of their metrics")
        else:
            answers[place] = facts
    if not answers or (url and problems):
        raise KvtierError("; ".join(problems) or "nowhere to ask: every port is 0; name one with --url host:port")
    if json:
        sources = [{"url": place, **_plain(facts)} for place, facts in answers.items()]
        print(json_module.dumps({"sources": sources}, indent=2))
        return
    console = Console()
    for place, facts in answers.items():
        _print(console, place, facts)


def _named(urls: list[str] | None) -> list[str]:
    return [metrics_url(url) for url in urls or ()]


def _configured(config: Config) -> list[str]:
    """Returns where the file's engine and pool listen, without those that take any free port."""
    pool_scheme = "https" if config.pool_service.tls_certificate is not None else "http"
    places = [("http", config.engine.listen), (pool_scheme, config.pool_service.http_listen)]
    return [metrics_url(f"{scheme}://{reachable(address)}") for scheme, address in places if not address.endswith(":0")]


def _ca_of(config: Config) -> Path | None:
    return None if config.pool.tls_ca is None else config.resolve_path(config.pool.tls_ca)


def _plain(facts: Facts) -> dict[str, Any]:
    plain = asdict(facts)
    plain["hit_rate"]["share"] = facts.hit_rate.share
    return plain


def _print(console: Console, place: str, facts: Facts) -> None:
    console.print(f"[bold]{facts.kind}[/bold] at {place}")
    console.print(_helping(facts))
    if facts.tiers:
        console.print(_tier_table(facts.tiers))
    if facts.paths:
        console.print(_path_table(facts.paths))
    if facts.moved_bytes:
        moved = ", ".join(f"{words} {_bytes(amount)}" for words, amount in facts.moved_bytes.items())
        console.print(f"payload: {moved}")
    if facts.memory_bytes:
        console.print(f"memory: {', '.join(f'{kind} {_bytes(of)}' for kind, of in facts.memory_bytes.items())}")
    if pinned := facts.pinned:
        payload, slabs = _bytes(pinned.payload_bytes), _bytes(pinned.slab_bytes)
        console.print(f"pinned now: {pinned.blocks:,.0f} blocks, {payload} in slabs of {slabs}")
    for title, counts in (
        ("blocks written, by answer", facts.written),
        ("blocks to be pinned, by answer", facts.pins),
        ("evicted from the device", facts.device_evictions),
        ("requests", facts.requests),
        *((f"calls ({protocol})", calls) for protocol, calls in facts.calls.items()),
    ):
        if counts:
            console.print(f"{title}: {_counts(counts)}")
    for tier, of_tier in facts.tiers.items():
        _print_notes(console, tier, of_tier)
    for words, count in facts.trouble.items():
        console.print(f"[yellow]{count:,.0f} {words}[/yellow]")
    console.print()


def _print_notes(console: Console, tier: str, facts: TierFacts) -> None:
    """What is worth a line of its own: a medium that fails, codecs, errors."""
    if facts.state not in (None, TierState.WRITABLE.value):
        console.print(f"[red]{tier} is {facts.state}: its medium fails[/red]")
    if facts.codecs.keys() - {"raw"}:
        console.print(f"{tier} packs: {_packed(facts.codecs)}")
    if facts.errors:
        console.print(f"[yellow]errors of {tier}: {_counts(facts.errors)}[/yellow]")


def _helping(facts: Facts) -> str:
    rate = facts.hit_rate
    if rate.share is None:
        return f"Hit rate: nobody has asked for {rate.unit} yet."
    shares = ", ".join(f"{tier} {count / rate.asked:.1%}" for tier, count in rate.by_tier.items()) or "none from any"
    text = f"Hit rate: {rate.share:.1%} of {rate.asked:,.0f} {rate.unit} ({shares})."
    if facts.ttft_mean_s is not None:
        text += f" Time to first token: {facts.ttft_mean_s * 1000:,.0f} ms on average."
    return text


def _tier_table(tiers: dict[str, TierFacts]) -> Table:
    return _columns("tier", {name: _tier_figures(tier) for name, tier in tiers.items()})


def _tier_figures(tier: TierFacts) -> dict[str, str]:
    full = "-"
    if tier.used_bytes is not None and tier.capacity_bytes:
        full = f"{tier.used_bytes / tier.capacity_bytes:.0%}"
    return {
        "hits": f"{tier.read_hits:,.0f}",
        "misses": f"{tier.read_misses:,.0f}",
        "read": _bytes(tier.bytes_read),
        "read at": _speed(tier.read_bytes_per_s),
        "written": _bytes(tier.bytes_written),
        "written at": _speed(tier.write_bytes_per_s),
        "holds": "-" if tier.used_bytes is None else _bytes(tier.used_bytes),
        "full": full,
        "evicted": "-" if tier.evicted_blocks is None else f"{tier.evicted_blocks:,.0f}",
    }


def _path_table(paths: dict[str, PathFacts]) -> Table:
    """Only rows that there is something for."""
    ops = list(dict.fromkeys(op for path in paths.values() for op in (*path.bytes_by_op, *path.calls_by_op)))
    with_calls = any(path.calls_by_op for path in paths.values())
    figures: dict[str, dict[str, str]] = {name: {} for name in paths}
    for name, path in paths.items():
        for op in ops:
            figures[name][op] = _bytes(path.bytes_by_op.get(op, 0.0))
            if with_calls:
                figures[name][f"{op} calls"] = f"{path.calls_by_op.get(op, 0.0):,.0f}"
    return _columns("path to the pool", figures)


def _columns(corner: str, figures: dict[str, dict[str, str]]) -> Table:
    """A column each, as there are few of them and many figures: four fit into the 80 columns that a pipe has.

    :param figures: by column and row; all with the same rows.
    """
    table = Table()
    table.add_column(corner, overflow="fold")
    for name in figures:
        # Folded where even so there is no room: a figure without its end would be another one.
        table.add_column(name, justify="right", overflow="fold")
    for row in next(iter(figures.values())):
        table.add_row(row, *(column[row] for column in figures.values()))
    return table


def _packed(codecs: dict[str, CodecFacts]) -> str:
    return ", ".join(
        f"{_bytes(of.raw_bytes)} {codec} ({of.raw_bytes / of.stored_bytes:.2f} to 1)" if of.stored_bytes else codec
        for codec, of in codecs.items()
    )


def _counts(counts: dict[str, float]) -> str:
    return ", ".join(f"{name} {count:,.0f}" for name, count in counts.items())


def _bytes(amount: float) -> str:
    for unit in _UNITS[:-1]:
        if amount < 1024:
            return f"{amount:,.0f} {unit}" if unit == "B" else f"{amount:,.1f} {unit}"
        amount /= 1024
    return f"{amount:,.1f} {_UNITS[-1]}"


def _speed(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{bytes_per_s / 1e9:.2f} GB/s"
