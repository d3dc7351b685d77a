"""Results of runs as a table in Markdown: what `docs/gpu-results.md` is made of."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvtier_bench.gpu.run.journal import Journal, Outcome, outcomes_of
from kvtier_bench.measuring.report import Case

_HEADING = "| case | GB/s | median | beside | notes |\n| --- | ---: | ---: | --- | --- |"


def load(path: Path) -> list[Outcome]:
    """The outcomes in gpu.json, or in gpu.jsonl, which is all that a killed run has left."""
    return Journal(path).outcomes() if path.suffix == ".jsonl" else outcomes_of(json.loads(path.read_text()))


def markdown(outcomes: Sequence[Outcome]) -> str:
    """A section per part, with the date, the commit and the machine of its run."""
    return "\n\n".join(_section(outcome) for outcome in outcomes)


def _section(outcome: Outcome) -> str:
    facts, machine = outcome.facts, outcome.facts.get("machine", {})
    of_machine = ", ".join(f"{name} {value}" for name, value in machine.items() if value is not None)
    lines = [f"## {outcome.part}", "", f"{facts.get('date')}, commit {facts.get('commit')}, {of_machine}."]
    if outcome.problem:
        lines += ["", f"This part did not end well: {outcome.problem}."]
    return "\n".join([*lines, "", _HEADING, *_rows(outcome.cases)])


def _rows(cases: Sequence[Case]) -> Iterator[str]:
    op = None
    for case in cases:
        if case.op != op:
            op = case.op
            yield f"| **{_cell(op)}** | | | | |"
        speed = "" if case.gb_per_s is None else f"{case.gb_per_s:.2f}"
        took = "" if case.p50_us is None else f"{case.p50_us / 1e3:,.3f} ms"
        beside = "" if case.ratio_to_floor is None else f"{case.ratio_to_floor:.2f}x {case.floor}"
        yield f"| {_cell(case.name)} | {speed} | {took} | {_cell(beside)} | {_cell(case.detail)} |"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
