"""The parts of a run, in their order, and how long each may take. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Part:
    """Something to check or to measure, in a process of its own."""

    name: str
    budget_s: float
    """The most it may take, beginning to end; killed some seconds later."""
    module: str = ""
    """The name of the module in this package."""
    function: str = "measure"
    """The function of the module, which takes a `Setting` and gives rows."""


_CHECKS = Part("checks", 200, "parts.checks")

PARTS = (
    Part("smoke", 50, "parts.checks", "smoke"),
    Part("beside", 75, "parts.beside"),
    Part("pages", 40, "parts.pages"),
    Part("pinning", 30, "parts.pinning"),
    Part("races", 40, "parts.races"),
    Part("host-copies", 30, "parts.copies", "to_host"),
    Part("copies", 20, "parts.copies", "on_device"),
    Part("ttft", 60, "parts.ttft"),
    Part("spill", 20, "parts.spill"),
    Part("prefill", 40, "parts.prefill"),
    Part("decode", 15, "parts.decode", "plain"),
    Part("shared-decode", 12, "parts.decode", "shared"),
    Part("decode-step", 20, "parts.step"),
    Part("layers", 25, "parts.layers"),
    Part("invariant", 25, "parts.invariant"),
    _CHECKS,
)
"""The first run. What is right first, then what decides the most; the last has what the others leave."""
SECOND = (
    _CHECKS,
    Part("planted", 60, "parts.races", "planted"),
    Part("switches", 110, "parts.ttft", "switches"),
    Part("sweep", 140, "parts.sweep"),
)
"""The second one: more checks, what may be switched off, and tuning."""
_THIRD_S = {"beside": 105.0, "races": 300.0, "ttft": 105.0}
THIRD = tuple(replace(part, budget_s=_THIRD_S[part.name]) for part in PARTS if part.name in _THIRD_S)
"""The third one: parts of the first with more time, all rounds of the races above all."""
ALL = tuple(dict.fromkeys((*PARTS, *SECOND)))
TOTAL_S = 520.0
"""The time for all parts: with 20 s for unpacking wheels before, nine of the ten minutes that a command may have."""
GRACE_S = 8.0
"""The seconds after its budget that a part may take to end by itself."""


def scaled(parts: Sequence[Part], total_s: float) -> list[Part]:
    """The parts with as much more time each as `total_s` has for all of them; never with less."""
    factor = max(1.0, (total_s - GRACE_S) / sum(part.budget_s for part in parts))
    return [replace(part, budget_s=factor * part.budget_s) for part in parts]


def part_of(name: str) -> Part:
    """:raises ValueError: there is none of this name."""
    for part in ALL:
        if part.name == name:
            return part
    raise ValueError(f"no part is called {name!r}")
