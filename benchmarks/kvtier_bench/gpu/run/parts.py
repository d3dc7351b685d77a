"""The parts of a run, in their order, and how long each may take. Imports no torch."""

from dataclasses import dataclass


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
    _CHECKS,
)
"""The first run. What is right first, then what decides the most; the last has what the others leave."""
SECOND = (_CHECKS, Part("switches", 90, "parts.ttft", "switches"), Part("sweep", 200, "parts.sweep"))
"""The second one: more checks, what may be switched off, and tuning."""
ALL = tuple(dict.fromkeys((*PARTS, *SECOND)))
TOTAL_S = 520.0
"""The time for all parts: with 20 s for unpacking wheels before, nine of the ten minutes that a command may have."""
GRACE_S = 8.0
"""After its budget, for a part to end by itself."""


def part_of(name: str) -> Part:
    """:raises ValueError: there is none of this name."""
    for part in ALL:
        if part.name == name:
            return part
    raise ValueError(f"no part is called {name!r}")
