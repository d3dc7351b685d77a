"""What went wrong, in words: the counters that an operator looks at first."""

from kvtier.cli.stats.samples import Samples

_TROUBLE = (
    ("kvtier_corrupt_blocks_total", "tier", "blocks of {} found damaged; each was a miss"),
    ("kvtier_unopened_blocks_total", "reason", "sealed blocks that could not be opened: {}"),
    ("kvtier_tier_degraded_total", "state", "times that a failing medium made a tier {}"),
    ("kvtier_degraded_fetches_total", "", "fetches in which a block failed and was computed after all"),
    ("kvtier_failed_blocks_total", "", "blocks offered that could not be loaded, and were computed"),
    ("kvtier_deadlines_missed_total", "verb", "deadlines of a {} missed"),
    ("kvtier_lookups_skipped_total", "", "lookups without the shared tier: too many were pending"),
    ("kvtier_saves_dropped_total", "", "blocks not saved: too much was queued"),
    ("kvtier_evictions_waited_total", "", "allocations that waited for a copy"),
    ("kvtier_evicted_unwritten_total", "tier", "blocks that host memory lost before {} had them"),
    ("kvtier_io_process_restarts_total", "", "processes of slow tiers that ended and were replaced"),
    ("kvtier_engine_preemptions_total", "", "requests that lost their blocks and started again"),
    ("kvtier_pool_evicted_unwritten_total", "tier", "blocks that memory lost before {} had them"),
    ("kvtier_pool_unread_blocks_total", "tier", "blocks that {} had, and that were a miss for want of room"),
    ("kvtier_pool_logins_refused_total", "reason", "logins refused: {}"),
    ("kvtier_pool_strangers_refused_total", "reason", "connections refused before a login: their {} is not the port's"),
    ("kvtier_pool_block_connections_refused_total", "", "connections refused: max_connections were open"),
    ("kvtier_pool_tenant_refusals_total", "limit", "refusals: a tenant had its part of {}"),
    ("kvtier_pool_expired_leases_total", "", "leases that ended by their deadline"),
    ("kvtier_pool_audit_lines_lost_total", "", "lines of the audit log lost"),
)
"""Counter, the label that its words need, and those words."""


def trouble_of(samples: Samples) -> dict[str, float]:
    """Returns what went wrong, in words, and how often."""
    found: dict[str, float] = {}
    for name, label, words in _TROUBLE:
        for value, count in samples.by(name, label).items():
            found[words.format(value)] = count
    return found
