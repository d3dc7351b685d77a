"""What every process of ours says of itself to Prometheus: which release it is, and what it takes of the machine."""

import platform
from importlib.metadata import version
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge, ProcessCollector


def describe_process(registry: CollectorRegistry) -> None:
    """Adds `kvtier_build_info` and `process_*` to a registry, once. For processes that are ours alone: engines that
    kvtier is a plug-in of have metrics of their process already."""
    build_info(registry)
    ProcessCollector(registry=registry)


def build_info(registry: CollectorRegistry, **options: Any) -> None:
    """Adds `kvtier_build_info` to a registry, once.

    :param options: further ones of `Gauge`.
    """
    build = Gauge(
        "kvtier_build_info",
        "1, with the release of kvtier and of Python that the process runs",
        ["version", "python_version"],
        registry=registry,
        **options,
    )
    build.labels(version("kvtier"), platform.python_version()).set(1)


def leave_out_creation_times() -> None:
    """Leaves out the series `_created` of each counter, which double what Prometheus keeps and answer nothing. To
    be called at the start of a process that is ours alone, as it is a setting of the library as a whole."""
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
