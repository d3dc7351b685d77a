"""What the pool service counts of calls and connections. Its store counts blocks (`kvtier.store.metrics`)."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

from kvtier.protocol.block import Result, Verb
from kvtier.store.tenant_counts import Counts

LOGIN_REFUSALS = ("no_credentials", "short_token", "long_token", "unknown_token", "expired_token", "conflict", "role")
"""Why a login may be refused: `kvtier_pool.auth.LoginRefusedError.reason`."""


class PoolMetrics:
    """Owns nothing but the counters; `registry` is the caller's. Any thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._block_calls_by: dict[tuple[str, str], Counter] = {}
        """Children of `block_calls`; changed by single operations only."""
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self.calls = counter(
            "kvtier_pool_calls", "Calls by verb and by the gRPC code they ended with.", ["verb", "code"]
        )
        self.block_calls = counter(
            "kvtier_pool_block_calls",
            "Requests over the block protocol by verb and result; lost: the connection ended before the answer.",
            ["verb", "result"],
        )
        for verb in (verb for verb in Verb if verb is not Verb.HELLO):
            for result in (*Result, "lost"):
                self.block_calls.labels(verb, result)
        self.block_connections = gauge("kvtier_pool_block_connections", "Open connections of the block protocol.")
        self.block_connections_refused = counter(
            "kvtier_pool_block_connections_refused", "Connections turned away because max_connections were open."
        )
        self.tenant_refusals = counter(
            "kvtier_pool_tenant_refusals",
            "Connections, calls, streams and requests turned away because their tenant had its part of a limit.",
            ["tenant", "limit"],
        )
        self.tenant_delays = counter(
            "kvtier_pool_tenant_delays",
            "Requests that waited for a moment because their tenant had had what it may have in a second.",
            ["tenant", "limit"],
        )
        self.logins_refused = counter("kvtier_pool_logins_refused", "Logins that were refused, by reason.", ["reason"])
        for reason in LOGIN_REFUSALS:
            self.logins_refused.labels(reason)
        self.strangers_refused = counter(
            "kvtier_pool_strangers_refused",
            "Connections that ended before a login: the peer spoke another protocol than the port (protocol), or the "
            "two could not agree on TLS (tls).",
            ["door", "reason"],
        )
        for door in ("block", "http"):
            for reason in ("protocol", "tls"):
                self.strangers_refused.labels(door, reason)
        self.audit_lost = counter("kvtier_pool_audit_lines_lost", "Lines that the audit log had no room for.")
        self.trace_dropped = gauge("kvtier_pool_trace_dropped_keys", "Keys that the trace of record_trace lacks.")
        self.shared_bytes = gauge(
            "kvtier_pool_shared_held_bytes", "Payload bytes that clients hold in shared memory: leases and write slots."
        )
        self.expired_leases = counter(
            "kvtier_pool_expired_leases", "Leases that ended by their deadline, not by their client."
        )

    def refusals_of(self, tenant: str) -> int:
        """How often this tenant was turned away because it had its part of a limit. For reports: O(samples)."""
        samples = (sample for metric in self.tenant_refusals.collect() for sample in metric.samples)
        of_tenant = (s.value for s in samples if s.name.endswith("_total") and s.labels["tenant"] == tenant)
        return int(sum(of_tenant))

    def count_block_call(self, verb: str, result: str) -> None:
        """`block_calls`, at a third of the price: a message of shared memory takes no longer than its counting."""
        child = self._block_calls_by.get((verb, result))
        if child is None:
            child = self._block_calls_by[verb, result] = self.block_calls.labels(verb, result)
        child.inc()


class UnwrittenBlocks(Collector):
    """Counts what memory did not take, by tenant. Any thread."""

    def __init__(self, counts: Callable[[], Iterable[tuple[str, Counts]]]) -> None:
        """:param counts: says what each tenant asked for, by name."""
        self._counts = counts

    def collect(self) -> Iterator[CounterMetricFamily]:
        """`prometheus_client`'s."""
        family = CounterMetricFamily(
            "kvtier_pool_tenant_unwritten_blocks",
            "Blocks that were not written. full: no room may be freed; throttled: the disk, or another tier that keeps "
            "what is acknowledged, is behind.",
            labels=["tenant", "status"],
        )
        for name, counts in self._counts():
            family.add_metric([name, "full"], counts.num_full)
            family.add_metric([name, "throttled"], counts.num_throttled)
        yield family
