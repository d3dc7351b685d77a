"""What an engine's work costs, as the counters of its `/metrics` say of late: vLLM's and kvtier's own engine's."""

import re
from collections.abc import Mapping

_NAMES = {
    "kvtier_engine_prompt_seconds_total": "compute_s",
    "kvtier_engine_computed_prompt_tokens_total": "computed_tokens",
    "vllm:request_prefill_time_seconds_sum": "compute_s",
    "vllm:request_prefill_kv_computed_tokens_sum": "computed_tokens",
    "kvtier_path_seconds_total": "fetch_s",
    "kvtier_path_bytes_total": "fetched_bytes",
    "kvtier_tier_used_bytes": "host_bytes",
    "kvtier_tier_held_blocks": "host_blocks",
}
_ONLY = {
    "fetch_s": b'op="read"',
    "fetched_bytes": b'op="read"',
    "host_bytes": b'tier="host"',
    "host_blocks": b'tier="host"',
}
"""What the labels of a sample must have."""
_SAMPLE = re.compile(
    rb"^(?:vllm:(?=kvtier))?(%s)(\{[^\n]*\})? ([0-9.eE+-]+)" % b"|".join(re.escape(name).encode() for name in _NAMES),
    re.MULTILINE,
)
_HALF = 0.5
"""The part that what was measured since the last look has in a price, and what was known before the other."""
_LEAST = {"computed_tokens": 256.0, "fetched_bytes": float(1 << 20)}
"""Less than so much since the last look says nothing yet."""
_MOST = 1e18
"""What no counter of a working engine reaches: nothing is learned from such a page."""


class LearnedPrices:
    """What one engine's prices were seen to be. Event loop only."""

    def __init__(self) -> None:
        self._counted: Mapping[str, float] = {}
        """The counters when a price was last taken from them."""
        self.token_s: float | None = None
        """Seconds to compute a token of a prompt. None: not known yet, as below."""
        self.pool_bytes_per_s: float | None = None
        self.block_bytes: float | None = None

    def learn(self, page: bytes) -> None:
        """Takes what an engine's page says now."""
        now: dict[str, float] = {}
        for name, labels, value in _SAMPLE.findall(page):
            what = _NAMES[name.decode()]
            if _ONLY.get(what, b"") in labels:
                now[what] = now.get(what, 0.0) + float(value)
        if not all(0 <= value < _MOST for value in now.values()):
            return
        if now.get("host_blocks"):
            self.block_bytes = now.get("host_bytes", 0.0) / now["host_blocks"]
        self.token_s = self._ratio("compute_s", "computed_tokens", now, self.token_s)
        seconds_per_byte = None if self.pool_bytes_per_s is None else 1 / self.pool_bytes_per_s
        seconds_per_byte = self._ratio("fetch_s", "fetched_bytes", now, seconds_per_byte)
        self.pool_bytes_per_s = 1 / seconds_per_byte if seconds_per_byte else None

    def _ratio(self, over: str, under: str, now: Mapping[str, float], known: float | None) -> float | None:
        """What one of `under` costs of `over`, by what was counted since it was last told."""
        before_over, before_under = self._counted.get(over, 0.0), self._counted.get(under, 0.0)
        if now.get(under, 0.0) < before_under:  # the engine has begun anew
            before_over = before_under = 0.0
        amount = now.get(under, 0.0) - before_under
        if amount < _LEAST[under]:
            return known
        self._counted = {**self._counted, over: now.get(over, 0.0), under: now[under]}
        found = max(0.0, now.get(over, 0.0) - before_over) / amount
        return found if known is None else (1 - _HALF) * known + _HALF * found
