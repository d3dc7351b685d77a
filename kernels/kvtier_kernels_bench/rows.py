"""What parts give: rows of the report, as they go from a part's process to the one that prints."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from kvtier.bench.report import Case
from kvtier.bench.rounds import Samples, Spread

_MOST_RELATIVE_DIFFERENCE = 0.05
"""Of the largest number of a result in 16 bits, between two ways to compute it: rounding makes a tenth of that."""


def left_out(op: str) -> Case:
    """Instead of the rows for which there was no time."""
    return Case("left out", op, detail="the time was over")


def disagreement(name: str, op: str, difference: float, largest: float) -> Iterator[Case]:
    """A failed check where results differ from what they should be by so much, or are NaN; nothing otherwise.

    :param largest: magnitude of what they should be.
    """
    if not difference <= _MOST_RELATIVE_DIFFERENCE * largest:  # NaN is not
        yield Case(name, op, detail=f"FAILED: off by {difference:.3g}, the largest number is {largest:.3g}")


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
    """`Case.of` without the host's CPU time, which says nothing here; the first of `figures` is shown in the table."""
    shown = next(iter(figures.items()), None) if figures else None
    case = Case.of(
        name,
        op,
        samples,
        floor=floor,
        beside=beside,
        round_bytes=round_bytes,
        figures=dict(figures or {}),
        detail=f"{shown[1]:,.1f} {shown[0]}" if shown else "",
        **fields,
    )
    return replace(case, cpu_s_per_gib=None)


def pack(case: Case) -> str:
    """One line."""
    return json.dumps(asdict(case))


def unpack(line: str) -> Case:
    """The inverse. Raises `ValueError` for half a line: of a part that was killed while it wrote."""
    fields = json.loads(line)
    fields["beside"] = {name: Spread(**spread) for name, spread in fields["beside"].items()}
    if fields["ratio_spread"] is not None:
        fields["ratio_spread"] = tuple(fields["ratio_spread"])
    return Case(**fields)


def prefill_flops(num_heads: int, head_dim: int, new: int, cached: int) -> float:
    """Of causal attention of `new` tokens over `cached` ones and themselves: two products, two operations each."""
    pairs = new * cached + new * (new + 1) / 2
    return 4.0 * num_heads * head_dim * pairs


def median_s(samples: Samples) -> float:
    return Spread.of(samples.rounds_s).median_s
