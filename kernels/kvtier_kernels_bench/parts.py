"""The parts of a run, in their order, and how long each may take. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """Something to check or to measure, in a process of its own."""

    name: str
    budget_s: float
    """The most it may take, beginning to end; killed some seconds later."""


PARTS = (
    Part("checks", 130),
    Part("copies", 25),
    Part("host-copies", 35),
    Part("prefill", 55),
    Part("decode", 20),
    Part("shared-decode", 20),
    Part("decode-step", 30),
    Part("spill", 30),
    Part("layers", 35),
    Part("ttft", 110),
    Part("sweep", 120),
)
"""What is right first, then what was asked for, then what time is left for: the last has what the others leave."""
TOTAL_S = 460.0
"""Of everything: under eight minutes, with some to spare for unpacking wheels before, and for writing it down."""
GRACE_S = 8.0
"""After its budget, for a part to end by itself."""
