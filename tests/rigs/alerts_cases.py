"""For each alert, series that make it fire, as `promtool test rules` takes them."""

CASES: dict[str, list[tuple[str, str]]] = {
    "KvtierPoolDown": [('up{job="kvtier-pool",instance="p"}', "1 0x60")],
    "KvtierBreakerOpen": [('kvtier_open_breakers{job="j",instance="e",tier="pool"}', "0 1x60")],
    "KvtierLoginRefusedByPool": [
        (
            'vllm:kvtier_io_errors_total{job="j",instance="v",tier="pool",op="lookup",error="UnauthenticatedError"}',
            "0x50 1x10",
        )
    ],
    "KvtierIoErrors": [
        ('kvtier_io_errors_total{job="j",instance="p",tier="disk",op="write",error="ENOSPC"}', "0+1x60")
    ],
    "KvtierCorruptBlocks": [('kvtier_corrupt_blocks_total{job="j",instance="p",tier="disk"}', "0x50 1x10")],
    "KvtierUnopenedBlocks": [
        ('kvtier_unopened_blocks_total{job="j",instance="p",tier="redis",reason="unknown_key"}', "0+1x60")
    ],
    "KvtierTierDegraded": [('kvtier_tier_state{job="j",instance="p",tier="disk",state="read_only"}', "0 1x60")],
    "KvtierTierBehind": [('kvtier_pool_evicted_unwritten_total{job="j",instance="p",tier="disk"}', "0+5x60")],
    "KvtierWritesRefused": [
        ('kvtier_pool_written_blocks_total{job="j",instance="p",status="stored"}', "0+80x60"),
        ('kvtier_pool_written_blocks_total{job="j",instance="p",status="full"}', "0+20x60"),
    ],
    "KvtierTenantRefused": [
        ('kvtier_pool_tenant_refusals_total{job="j",instance="p",limit="max_connections"}', "0+1x60")
    ],
    "KvtierConnectionsRefused": [('kvtier_pool_block_connections_refused_total{job="j",instance="p"}', "0x50 1x10")],
    "KvtierLoginsRefused": [
        ('kvtier_pool_logins_refused_total{job="j",instance="p",reason="unknown_token"}', "0x50 20x10")
    ],
    "KvtierAuditLinesLost": [('kvtier_pool_audit_lines_lost_total{job="j",instance="p"}', "0x50 1x10")],
    "KvtierFetchesFail": [
        ('kvtier_recomputed_tokens_total{job="j",instance="e",reason="failed"}', "0+10x60"),
        ('kvtier_hit_tokens_total{job="j",instance="e",tier="pool"}', "0+100x60"),
    ],
    "KvtierHitRateFell": [
        ('kvtier_hit_tokens_total{job="j",instance="e",tier="pool"}', "0+80x1440 115200x120"),
        ('kvtier_requested_tokens_total{job="j",instance="e"}', "0+100x1560"),
    ],
    "KvtierIoProcessRestarts": [('kvtier_io_process_restarts_total{job="j",instance="e"}', "0x50 4x10")],
}
"""Series and their values, one a minute."""
END_OF_DAY = ("KvtierHitRateFell",)
"""Looked at after 26 hours, the others after 55 minutes."""
WELL: list[tuple[str, str]] = [
    ('up{job="kvtier-pool",instance="p"}', "1x60"),
    ('kvtier_open_breakers{job="j",instance="e",tier="pool"}', "0x60"),
    ('kvtier_io_errors_total{job="j",instance="e",tier="pool",op="read",error="UnavailableError"}', "0x60"),
    ('kvtier_corrupt_blocks_total{job="j",instance="p",tier="disk"}', "3x60"),
    ('kvtier_tier_state{job="j",instance="p",tier="disk",state="writable"}', "1x60"),
    ('kvtier_pool_written_blocks_total{job="j",instance="p",status="stored"}', "0+80x60"),
    ('kvtier_pool_written_blocks_total{job="j",instance="p",status="full"}', "0x60"),
    ('kvtier_pool_logins_refused_total{job="j",instance="p",reason="unknown_token"}', "0 1x60"),
    ('kvtier_recomputed_tokens_total{job="j",instance="e",reason="failed"}', "0x60"),
    ('kvtier_hit_tokens_total{job="j",instance="e",tier="pool"}', "0+100x60"),
    ('kvtier_requested_tokens_total{job="j",instance="e"}', "0+100x60"),
]
"""Pools and engines that are well, one login aside."""
