"""What `kvtier stats` prints of an engine or a pool, at any width."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvtier.cli.amounts import (
    UNKNOWN,
    bytes_text,
    count_text,
    counts_text,
    seconds_text,
    share_text,
    speed_text,
)
from kvtier.cli.stats.facts import CodecFacts, Facts, PathFacts, TierFacts
from kvtier.events import TierState


def print_report(console: Console, place: str, facts: Facts) -> None:
    """Prints all that is known of one process since its start."""
    console.print(f"[bold]{facts.kind}[/bold] at {escape(place)}")
    for line in _helping(facts):
        console.print(line)
    if facts.tiers:
        console.print(_columns("tier", {name: _tier_figures(tier) for name, tier in facts.tiers.items()}))
    if facts.paths:
        console.print(_path_table(facts.paths))
    if facts.moved_bytes:
        moved = ", ".join(f"{words} {bytes_text(amount)}" for words, amount in facts.moved_bytes.items())
        console.print(f"payload: {moved}")
    if facts.memory_bytes:
        console.print(f"memory: {', '.join(f'{kind} {bytes_text(of)}' for kind, of in facts.memory_bytes.items())}")
    if pinned := facts.pinned:
        payload, slabs = bytes_text(pinned.payload_bytes), bytes_text(pinned.slab_bytes)
        console.print(f"pinned now: {pinned.blocks:,.0f} blocks, {payload} in slabs of {slabs}")
    for title, counts in (
        ("blocks written, by answer", facts.written),
        ("pages", facts.pages),
        ("blocks to be pinned, by answer", facts.pins),
        ("evicted from the device", facts.device_evictions),
        ("requests", facts.requests),
        *((f"calls ({protocol})", calls) for protocol, calls in facts.calls.items()),
    ):
        if counts:
            console.print(f"{title}: {counts_text(counts)}")
    for tier, of_tier in facts.tiers.items():
        for line in tier_notes(tier, of_tier):
            console.print(line)
    for words, count in facts.trouble.items():
        console.print(f"[yellow]{count:,.0f} {words}[/yellow]")
    console.print()


def tier_notes(tier: str, facts: TierFacts) -> list[str]:
    """Returns what is worth a line of its own: a medium that fails, an open breaker, codecs, errors. With markup."""
    notes = []
    if facts.state not in (None, TierState.WRITABLE.value):
        notes.append(f"[red]{tier} is {facts.state}: its log says why[/red]")
    if facts.open_breakers:
        notes.append(f"[red]{tier} is left alone, its blocks miss (open breakers: {facts.open_breakers:,.0f})[/red]")
    if facts.codecs.keys() - {"raw"}:
        notes.append(f"{tier} packs: {_packed(facts.codecs)}")
    if facts.errors:
        notes.append(f"[yellow]errors of {tier}: {counts_text(facts.errors)}[/yellow]")
    return notes


def _helping(facts: Facts) -> list[str]:
    """The answer to the question, in sentences."""
    rate, first = facts.hit_rate, facts.first_token
    if rate.share is None:
        return [f"Hit rate: nobody has asked for {rate.unit} yet."]
    shares = ", ".join(f"{tier} {count / rate.asked:.1%}" for tier, count in rate.by_tier.items()) or "none from any"
    asked = f"{rate.asked:,.0f} {rate.unit}" + (f" {rate.way}" if rate.unit == "blocks" else "")
    lines = [f"Hit rate: {rate.share:.1%} of {asked} ({shares})."]
    times = {"without hits": first.cold_s, "with hits": first.hit_s}
    told = ", ".join(f"{seconds_text(of)} {words}" for words, of in times.items() if of is not None)
    if first.all_s is not None:
        lines.append(f"Time to first token: {told or f'{seconds_text(first.all_s)} on average'}.")
    if facts.saved is not None and facts.saved.tokens:
        about = "" if facts.saved.seconds is None else f", about {seconds_text(facts.saved.seconds)} of computing"
        lines.append(f"Saved: {facts.saved.tokens:,.0f} tokens were not computed{about}.")
    return lines


def _tier_figures(tier: TierFacts) -> dict[str, str]:
    full = UNKNOWN
    if tier.used_bytes is not None and tier.capacity_bytes:
        full = f"{tier.used_bytes / tier.capacity_bytes:.0%}"
    return {
        "looked up": count_text(tier.looked_up),
        "of these found": share_text(tier.found, tier.looked_up),
        "blocks read": count_text(tier.read_hits),
        "read, not there": count_text(tier.read_misses),
        "read": bytes_text(tier.bytes_read),
        "read at": speed_text(tier.read_bytes_per_s),
        "written": bytes_text(tier.bytes_written),
        "written at": speed_text(tier.write_bytes_per_s),
        "holds": bytes_text(tier.used_bytes),
        "can hold": bytes_text(tier.capacity_bytes),
        "full": full,
        "evicted": count_text(tier.evicted_blocks),
    }


def _path_table(paths: dict[str, PathFacts]) -> Table:
    """Returns a table of the rows that there is something for."""
    ops = list(dict.fromkeys(op for path in paths.values() for op in (*path.bytes_by_op, *path.calls_by_op)))
    with_calls = any(path.calls_by_op for path in paths.values())
    figures: dict[str, dict[str, str]] = {name: {} for name in paths}
    for name, path in paths.items():
        for op in ops:
            figures[name][op] = bytes_text(path.bytes_by_op.get(op, 0.0))
            if with_calls:
                figures[name][f"{op} calls"] = f"{path.calls_by_op.get(op, 0.0):,.0f}"
    return _columns("path to the pool", figures)


def _columns(corner: str, figures: dict[str, dict[str, str]]) -> Table:
    """A column each, as there are few of them and many figures: four fit into the 80 columns that a pipe has. Rows of
    which nothing is known are left out.

    :param figures: by column and row; all with the same rows.
    """
    table = Table()
    table.add_column(corner, overflow="fold")
    for name in figures:
        # Folded where even so there is no room: a figure without its end would be another one.
        table.add_column(name, justify="right", overflow="fold")
    for row in next(iter(figures.values())):
        cells = [column[row] for column in figures.values()]
        if any(cell != UNKNOWN for cell in cells):
            table.add_row(row, *cells)
    return table


def _packed(codecs: dict[str, CodecFacts]) -> str:
    return ", ".join(
        f"{bytes_text(of.raw_bytes)} {codec} ({of.raw_bytes / of.stored_bytes:.2f} to 1)" if of.stored_bytes else codec
        for codec, of in codecs.items()
    )
