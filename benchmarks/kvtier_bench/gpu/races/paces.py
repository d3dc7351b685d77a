"""How a simulated device runs in a race suite: as no device is forbidden to."""

import itertools
import random

from kvtier_bench.gpu.simulation.device import Stream, Work


class RacePace:
    """Rounds take turns: each stream has a speed of its own, nothing is done before somebody waits for it, or
    everything as soon as it may be. Guarded by the timeline's lock."""

    def __init__(self, numbers: random.Random) -> None:
        self._random = numbers
        self._kinds = itertools.cycle(["drifting", "lazy", "drifting", "eager"])
        self._kind = "eager"
        self._speeds: dict[str, float] = {}
        self.waits_to_be_wanted = False

    def begin_round(self) -> None:
        self._kind = next(self._kinds)
        self.waits_to_be_wanted = self._kind == "lazy"
        self._speeds.clear()

    def seconds(self, stream: Stream, _work: Work) -> tuple[float, bool]:
        moves_first = self._random.random() < 0.5
        if self._kind != "drifting":
            return 0.0, moves_first
        speed = self._speeds.setdefault(stream.name, 10 ** self._random.uniform(-5, -1.5))
        return speed * self._random.uniform(0.1, 2.0), moves_first

    def delay_s(self) -> float:
        """How long a thread of the host is held up: mostly microseconds, sometimes its core is given to another."""
        return 10 ** self._random.uniform(-5.5, -4 if self._random.random() < 0.9 else -1.5)
