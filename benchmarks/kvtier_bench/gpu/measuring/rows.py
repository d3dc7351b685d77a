"""What parts give: rows of the report, as they go from a part's process to the one that prints."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvtier_bench.measuring.report import Case
from kvtier_bench.measuring.rounds import NUM_ROUNDS, Samples, Spread

SHORT = "SHORT"
"""The word in the detail of a row that misses its bar."""
_LEAST_ROUNDS = 3
"""The least number of rounds of a median that is held to a bar."""


@dataclass(frozen=True, slots=True)
class Bar:
    """What a figure is held to: at least, or at most, a number."""

    what: str
    value: float
    """The value that was measured."""
    bound: float
    at_most: bool = False

    @property
    def is_met(self) -> bool:
        """A NaN meets none."""
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    @property
    def detail(self) -> str:
        """`0.91 x one copy, bar >= 0.90: met`."""
        sign = "<=" if self.at_most else ">="
        return f"{self.value:,.2f} {self.what}, bar {sign} {self.bound:,.2f}: {'met' if self.is_met else SHORT}"


def held_to(case: Case, bar: Bar, *, tiny: bool) -> Case:
    """The row with its bar and whether it is met, shown in the table.

    Figures in tiny size are held to nothing, nor are those of so few rounds that their median says little.
    """
    if tiny or (case.rounds is not None and case.rounds < _LEAST_ROUNDS):
        return case
    figures = {
        **case.figures,
        bar.what: bar.value,
        f"{bar.what}: bar": bar.bound,
        f"{bar.what}: met": float(bar.is_met),
    }
    return replace(case, detail="; ".join(filter(None, (case.detail, bar.detail))), figures=figures)


def left_out(op: str) -> Case:
    """Instead of the rows for which there was no time."""
    return Case("left out", op, detail="the time was over")


def failure(name: str, op: str, reason: str) -> Case:
    """A check that failed: the run's exit status is 1."""
    return Case(name, op, detail=f"FAILED: {reason}")


def row(
    name: str,
    op: str,
    samples: Samples,
    *,
    floor: tuple[str, Samples] | None = None,
    beside: Mapping[str, Samples] | None = None,
    round_bytes: int = 0,
    figures: Mapping[str, float] | None = None,
    **fields: Any,
) -> Case:
    """`Case.of` without the host's CPU time, which says nothing here; the first of `figures` is shown in the table, and
    the number of rounds where time has run out before there were nine."""
    shown = [f"{value:,.1f} {figure}" for figure, value in list((figures or {}).items())[:1]]
    num_rounds = len(samples.rounds_s)
    shown += [f"{num_rounds} round{'s' * (num_rounds > 1)}"] if num_rounds < NUM_ROUNDS else []
    case = Case.of(
        name,
        op,
        samples,
        floor=floor,
        beside=beside,
        round_bytes=round_bytes,
        figures=dict(figures or {}),
        detail=", ".join(shown),
        **fields,
    )
    return replace(case, cpu_s_per_gib=None)


def case_of(fields: Mapping[str, Any]) -> Case:
    """The row of which JSON has made these fields: the inverse of `dataclasses.asdict`."""
    beside = {name: Spread(**spread) for name, spread in fields["beside"].items()}
    spread = fields["ratio_spread"]
    return Case(**{**fields, "beside": beside, "ratio_spread": None if spread is None else tuple(spread)})


def prefill_flops(num_heads: int, head_dim: int, new: int, cached: int) -> float:
    """The operations of causal attention of `new` tokens to `cached` ones and themselves: two products, two each."""
    pairs = new * cached + new * (new + 1) / 2
    return 4.0 * num_heads * head_dim * pairs


def median_s(samples: Samples) -> float:
    return Spread.of(samples.rounds_s).median_s
