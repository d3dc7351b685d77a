"""Pictures as text: 80 columns are enough, and a pipe gets the same lines without colours."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvtier.cli.amounts import (
    UNKNOWN,
    bytes_text,
    counts_text,
    rate_text,
    seconds_text,
    share_text,
)
from kvtier.cli.stats.facts import Facts
from kvtier.cli.stats.report import tier_notes
from kvtier.cli.stats.requested import POOL
from kvtier.cli.top.picture import Picture, Rates

_BAR_CELLS = 8
_MOST_TENANTS = 12
_SMALL = 1e8
"""Below so many bytes a second, GB would show nothing but zeros."""


def view_of(pictures: Sequence[Picture], at_s: float) -> RenderableType:
    """All pictures, one below the other.

    :param at_s: when they were taken, in seconds since 1970.
    """
    blocks: list[RenderableType] = []
    for picture in pictures:
        blocks += [*_lines_of(picture, at_s), ""]
    return Group(*blocks)


def _lines_of(picture: Picture, at_s: float) -> Iterator[RenderableType]:
    facts = picture.facts
    if facts is None:
        since = time.strftime("%H:%M:%S", time.localtime(picture.down_since_s))
        yield f"[bold red]down[/bold red] {_place(picture)} since {since}"
        yield f"  [red]{escape(picture.problem or '')}[/red]"
        return
    yield _head(picture, facts, at_s)
    yield from _asked(facts, picture.rates)
    if facts.tiers:
        yield _tier_table(facts, picture.rates)
    if waits := _waits(facts):
        yield f"  {waits}"
    if facts.kind == POOL and picture.tenants is not None:
        yield _tenant_table(picture.tenants)
    for tier, of_tier in facts.tiers.items():
        for note in tier_notes(tier, of_tier):
            yield f"  {note}"
    for words, count in facts.trouble.items():
        per_s = None if picture.rates is None else picture.rates.trouble_per_s.get(words, 0.0)
        style = "yellow" if per_s else "dim"
        yield f"  [{style}]{count:,.0f} ({rate_text(per_s)}/s) {escape(words)}[/{style}]"


def _head(picture: Picture, facts: Facts, at_s: float) -> str:
    age = "" if facts.started_s is None else f", up {seconds_text(max(10.0, at_s - facts.started_s))}"
    release = "" if facts.release is None else f" {facts.release}"
    restarted = "  [bold yellow]restarted[/bold yellow]" if picture.restarted else ""
    return f"[bold]{facts.kind}[/bold]{release} {_place(picture)}{age}{restarted}"


def _place(picture: Picture) -> str:
    return escape(picture.url.removesuffix("/metrics"))


def _asked(facts: Facts, rates: Rates | None) -> Iterator[str]:
    rate = facts.hit_rate
    words = f"{rate.unit} {rate.way}" if facts.kind == POOL else rate.unit
    if rate.share is None:
        yield f"  hit rate -: no {rate.unit} were asked for yet"
        return
    by_tier = ", ".join(f"{tier} {amount / rate.asked:.1%}" for tier, amount in rate.by_tier.items()) or "from none"
    yield f"  hit rate [bold]{rate.share:.1%}[/bold] of {rate.asked:,.0f} {words}: {by_tier}"
    if rates is None:
        yield "  now: after the next interval"
        return
    missed = "missed" if facts.kind == POOL else "computed"
    share = share_text(sum(rates.hit_rate.by_tier.values()), rates.hit_rate.asked)
    yield (
        f"  now: {share}; {rate_text(rates.asked_per_s)}/s asked, {rate_text(rates.hit_per_s)}/s hit, "
        f"{rate_text(rates.missed_per_s)}/s {missed}"
    )
    if facts.first_token.all_s is not None:
        first = facts.first_token
        told = {"without hits": first.cold_s, "with hits": first.hit_s, "on average": first.all_s}
        times = {words: of for words, of in told.items() if of is not None}
        if len(times) > 1:
            times.pop("on average")
        yield f"  first token: {', '.join(f'{seconds_text(of)} {words}' for words, of in times.items())}"


def _tier_table(facts: Facts, rates: Rates | None) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 1), pad_edge=True)
    table.add_column("tier")
    for title in ("read/s", "written/s", "hit", "now", "evicted/s"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("fill", no_wrap=True)
    for name, tier in facts.tiers.items():
        now = None if rates is None else rates.tiers.get(name)
        table.add_row(
            name,
            UNKNOWN if now is None else _gb(now.read_bytes_per_s),
            UNKNOWN if now is None else _gb(now.written_bytes_per_s),
            share_text(tier.found, tier.looked_up),
            UNKNOWN if now is None or now.found_share is None else f"{now.found_share:.1%}",
            UNKNOWN if now is None else rate_text(now.evicted_per_s),
            _fill(tier.used_bytes, tier.capacity_bytes),
        )
    return table


def _fill(used_bytes: float | None, capacity_bytes: float | None) -> Text:
    """How full a tier is; without a warning, since a cache is full when it is used well."""
    if used_bytes is None:
        return Text(UNKNOWN)
    if not capacity_bytes:
        return Text(bytes_text(used_bytes))
    share = min(1.0, used_bytes / capacity_bytes)
    full = round(share * _BAR_CELLS)
    bar = Text("#" * full, "cyan") + Text("." * (_BAR_CELLS - full), "dim")
    return bar + Text(f" {share:.0%} of {bytes_text(capacity_bytes)}")


def _tenant_table(tenants: dict[str, Any]) -> Table:
    """The tenants that have most come first; the others are added up."""
    table = Table(box=None, padding=(0, 1, 0, 1), pad_edge=True)
    table.add_column("tenant", overflow="ellipsis", max_width=20)
    for title in ("memory", "of cap", "disk", "of cap", "hit", "refused"):
        table.add_column(title, justify="right", no_wrap=True)
    by_size = sorted(tenants.items(), key=lambda item: -_used(item[1], "memory"))
    for name, figures in by_size[:_MOST_TENANTS]:
        asked = figures["num_hits"] + figures["num_misses"]
        table.add_row(
            Text(name),
            *_part(figures, "memory"),
            *_part(figures, "disk"),
            share_text(figures["num_hits"], asked),
            f"{figures['num_refused']:,}",
        )
    if others := by_size[_MOST_TENANTS:]:
        sizes = [bytes_text(sum(_used(of, tier) for _, of in others)) for tier in ("memory", "disk")]
        table.add_row(f"{len(others)} others", sizes[0], "", sizes[1], "", "", "")
    return table


def _used(figures: dict[str, Any], tier: str) -> float:
    return float(figures["tiers"].get(tier, {}).get("used_bytes", 0))


def _part(figures: dict[str, Any], tier: str) -> tuple[str, str]:
    """What a tenant has of a tier, and how much that is of its cap."""
    used, cap = _used(figures, tier), figures["quota"].get(tier, {}).get("cap_bytes")
    return bytes_text(used), UNKNOWN if not cap else f"{used / cap:.0%}"


def _waits(facts: Facts) -> str:
    """Queues, and who is connected, at this moment."""
    queued = {f"queue to {name}": tier.queued_bytes for name, tier in facts.tiers.items()}
    told = [f"{words} {bytes_text(amount)}" for words, amount in queued.items() if amount is not None]
    if facts.waiting:
        told.append(counts_text(facts.waiting))
    if facts.connections is not None:
        told.append(f"connections {facts.connections:,.0f}")
    if facts.memory_bytes:
        told.append(f"memory {', '.join(f'{kind} {bytes_text(of)}' for kind, of in facts.memory_bytes.items())}")
    return "; ".join(told)


def _gb(bytes_per_s: float | None) -> str:
    if bytes_per_s is None:
        return UNKNOWN
    if not bytes_per_s:
        return "0 GB"
    return f"{bytes_per_s / 1e9:.2f} GB" if bytes_per_s >= _SMALL else f"{bytes_per_s / 1e6:.1f} MB"
