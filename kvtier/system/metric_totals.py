"""Metrics as those see them who may not know whose figures they are."""

from collections.abc import Collection, Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample


class Totals(Collector):
    """A registry without some labels, whose series are added up. As thread-safe as the registry."""

    def __init__(self, registry: Collector, hidden: Collection[str]) -> None:
        """:param hidden: the labels that nobody is to see."""
        self._registry, self._hidden = registry, frozenset(hidden)

    def collect(self) -> Iterator[Metric]:
        """`prometheus_client`'s."""
        for metric in self._registry.collect():
            if any(not self._hidden.isdisjoint(sample.labels) for sample in metric.samples):
                metric.samples = self._added_up(metric.samples)
            yield metric

    def _added_up(self, samples: list[Sample]) -> list[Sample]:
        """The samples without the hidden labels."""
        totals: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in samples:
            if sample.name.endswith("_created"):  # a time, of which there is no sum
                continue
            key = (
                sample.name,
                tuple((name, value) for name, value in sample.labels.items() if name not in self._hidden),
            )
            totals[key] = totals.get(key, 0.0) + sample.value
        return [Sample(name, dict(labels), value) for (name, labels), value in totals.items()]
