"""What one process of vLLM has counted, for the process that shows it to Prometheus."""

from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from kvtier.clock import MONOTONIC, Clock

_LOOK_S = 1.0
"""The time between two looks when nothing of note has happened: a look takes some tenths of a millisecond."""
_PREFIX = "kvtier_"
"""What all names of ours begin with."""


class Reading(NamedTuple):
    """One number of a registry."""

    kind: str
    """counter, gauge or histogram."""
    name: str
    """The name of the family, without `_total`."""
    help: str
    labels: dict[str, str]
    """A histogram's sample has `le`, too; without it, the number is the sum of all that was observed."""
    value: float

    @property
    def key(self) -> str:
        """Kind, name and labels as one text, which `parse` takes apart."""
        return "\t".join([self.kind, self.name, *(f"{label}={value}" for label, value in self.labels.items())])


def parse(key: str) -> tuple[str, str, dict[str, str]]:
    """The kind, name and labels that a `Reading.key` is made of."""
    kind, name, *labels = key.split("\t")
    return kind, name, dict(label.split("=", 1) for label in labels)


def readings(registry: CollectorRegistry) -> Iterator[Reading]:
    """Every number of kvtier's in a registry. Counts of a histogram are those of one bucket alone."""
    for family in registry.collect():
        if not family.name.startswith(_PREFIX):
            continue
        below: float = 0
        for sample in family.samples:
            value, labels = sample.value, dict(sample.labels)
            if family.type == "counter" and not sample.name.endswith("_total"):
                continue
            if family.type == "histogram":
                if sample.name.endswith("_bucket"):
                    value, below = sample.value - below, sample.value if labels["le"] != "+Inf" else 0
                elif not sample.name.endswith("_sum"):
                    continue
            yield Reading(family.type, family.name, family.documentation, labels, value)


class Relay:
    """Says by how much the numbers of a registry have changed. One thread."""

    def __init__(self, registry: CollectorRegistry, *, clock: Clock = MONOTONIC) -> None:
        self._registry, self._clock = registry, clock
        self._told: dict[str, float] = {}
        """The numbers as they were last told, by key."""
        self._look_at_s = 0.0

    def look_next(self) -> None:
        """Something of note has happened: the next `take` looks, since no other one may follow for long."""
        self._look_at_s = 0.0

    def take(self) -> dict[str, float]:
        """What was gained since the last look, by key. Numbers that are as they were are not in it."""
        now_s = self._clock()
        if now_s < self._look_at_s:
            return {}
        self._look_at_s = now_s + _LOOK_S
        gains = {}
        for reading in readings(self._registry):
            gain = reading.value - self._told.get(reading.key, 0.0)
            if gain:
                gains[reading.key], self._told[reading.key] = gain, reading.value
        return gains
