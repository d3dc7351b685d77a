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


_CHECKS = Part("checks", 200, "part_checks")

PARTS = (
    Part("smoke", 30, "part_checks", "smoke"),
    Part("beside", 75, "part_beside"),
    Part("pages", 40, "part_pages"),
    Part("pinning", 30, "part_pinning"),
    Part("races", 45, "part_races"),
    Part("host-copies", 30, "part_copies", "to_host"),
    Part("copies", 20, "part_copies", "on_device"),
    Part("ttft", 60, "part_ttft"),
    Part("spill", 20, "part_spill"),
    Part("prefill", 40, "part_prefill"),
    Part("decode", 15, "part_decode", "plain"),
    Part("shared-decode", 12, "part_decode", "shared"),
    Part("decode-step", 20, "part_step"),
    Part("layers", 25, "part_layers"),
    _CHECKS,
)
"""The first run. What is right first, then what decides the most; the last has what the others leave."""
SECOND = (_CHECKS, Part("switches", 90, "part_ttft", "switches"), Part("sweep", 200, "part_sweep"))
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
