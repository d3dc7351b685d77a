"""What goes wrong when: a pure function of the seed."""

import random
from collections.abc import Collection
from dataclasses import dataclass, field

ENGINES = ("engine-1", "engine-2", "engine-3")
POOLS = ("pool-a", "pool-b")
_LINKS = ("engine-1>pool-a", "engine-3>pool-b", "pool-a>redis", "pool-b>redis")
_PROCESSES = (*POOLS, *ENGINES, *(f"{engine}-io" for engine in ENGINES))
"""`-io`: the process of an engine's tiers."""
TARGETS = {
    "latency": _LINKS,
    "black_hole": _LINKS,
    "reset": _LINKS,
    "truncation": _LINKS,
    "bit_flips": _LINKS,
    "kill": _PROCESSES,
    "stop": (*_PROCESSES, "redis"),
    "redis_down": ("redis",),
    "redis_failover": ("redis",),
    "disk_full": ("disk-a",),
    "disk_hung": ("disk-a",),
    "clock_jump": ("clock",),
}
"""Where a kind of fault may happen."""
_JUMPS_S = (-86_400, -3600, -5, 5, 3600, 2 * 86_400)
"""The last is longer than Redis keeps a block that nobody uses."""
_GAP_S = 2.5
"""Between the beginnings of faults, on average: one or two are under way at a time."""
_LONGEST_S = 6.0
_QUIET_SHARE = 0.1
"""How much of the time, at its end, has no fault that begins."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong, and is put right again."""

    at_s: float
    kind: str
    target: str
    duration_s: float
    """Until a process is started anew, a link or disk heals, a clock is put right."""
    parameters: dict[str, float] = field(default_factory=dict)

    @property
    def end_s(self) -> float:
        return round(self.at_s + self.duration_s, 2)

    def __str__(self) -> str:
        return f"{self.kind} {self.target} {self.duration_s:.1f} s {self.parameters or ''}".rstrip()


def schedule(seed: int, seconds: float, kinds: Collection[str] = tuple(TARGETS)) -> list[Fault]:
    """In order. Each kind comes equally often, at least once; what has failed is put right before it fails anew.

    :param kinds: those that can be produced here.
    """
    rng = random.Random(seed)
    count = max(len(kinds), round(seconds / _GAP_S))
    faults: list[Fault] = []
    free_s: dict[str, float] = {}
    turn: list[str] = []
    for number in range(count):
        turn = turn or rng.sample(sorted(kinds), len(kinds))
        kind = turn.pop()
        at_s = (number + rng.random()) / count * seconds * (1 - _QUIET_SHARE)
        duration_s = rng.uniform(0.5, min(_LONGEST_S, max(1.0, seconds * _QUIET_SHARE)))
        target, parameters = rng.choice(TARGETS[kind]), _parameters(kind, rng)
        at_s = round(max(at_s, free_s.get(_group(target), 0.0)), 2)
        fault = Fault(at_s, kind, target, round(duration_s, 2), parameters)
        free_s[_group(target)] = fault.end_s
        faults.append(fault)
    return sorted(faults, key=lambda fault: fault.at_s)


def _parameters(kind: str, rng: random.Random) -> dict[str, float]:
    if kind == "latency":
        return {"delay_s": round(rng.uniform(0.005, 0.3), 3)}
    if kind == "clock_jump":
        return {"jump_s": rng.choice(_JUMPS_S)}
    return {}


def _group(target: str) -> str:
    """What a target is a part of. A process whose disk hangs cannot be killed, and one that is dead has no parts."""
    return {"disk-a": "pool-a"}.get(target, target.removesuffix("-io"))
