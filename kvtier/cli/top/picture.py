"""What one process did since it was last asked: totals, and rates of the interval, as plain values."""

import json
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from kvtier.cli.stats.asking import Heard, Places
from kvtier.cli.stats.command import plain
from kvtier.cli.stats.facts import Facts, TierFacts, facts_of
from kvtier.cli.stats.requested import POOL, HitRate
from kvtier.cli.stats.samples import Samples, get
from kvtier.errors import KvtierError

_LONG_AGO = 5
"""An interval this many times as long as it should be says nothing of now: the machine slept, or nobody answered."""


@dataclass(frozen=True, slots=True)
class TierRates:
    """What a tier did in a second of the interval. None: not told."""

    lookups_per_s: float | None
    found_share: float | None
    """The share of blocks found among those asked for in the interval; None if none were."""
    read_bytes_per_s: float | None
    written_bytes_per_s: float | None
    evicted_per_s: float | None


@dataclass(frozen=True, slots=True)
class Rates:
    """What a process did in the interval."""

    interval_s: float
    hit_rate: HitRate
    """Amounts of the interval."""
    tiers: dict[str, TierRates]
    asked_per_s: float
    """Tokens of prompts, or blocks."""
    hit_per_s: float
    trouble_per_s: dict[str, float]

    @property
    def missed_per_s(self) -> float:
        """What was computed after all, or was not there."""
        return max(0.0, self.asked_per_s - self.hit_per_s)


@dataclass(frozen=True, slots=True)
class Picture:
    """One process at one moment."""

    url: str
    problem: str | None
    """Why nothing is known of it now; None: it answers."""
    down_since_s: float | None
    """When it was first heard not to answer, in seconds since 1970."""
    restarted: bool
    """Whether it is another process than the one that was last heard."""
    facts: Facts | None
    rates: Rates | None
    """None: it was heard for the first time, or for the first time since its start."""
    tenants: dict[str, Any] | None
    """What a pool says of single tenants to an operator, as `GET /tenants` has it; None without its token."""

    def plain(self) -> dict[str, Any]:
        """What JSON has of it."""
        told = asdict(self)
        if self.facts is not None:
            told["facts"] = plain(self.facts)
        if self.rates is not None:
            told["rates"]["hit_rate"]["share"] = self.rates.hit_rate.share
            told["rates"]["missed_per_s"] = self.rates.missed_per_s
        return {"up": self.problem is None, **told}


class Watch:
    """Asks processes again and again, and compares. One thread."""

    def __init__(self, places: Places, interval_s: float) -> None:
        """Asks nobody yet."""
        self._places = places
        self._interval_s = interval_s
        self._last: dict[str, tuple[float, Samples]] = {}
        """When each process was last heard, and what it said."""
        self._down_since_s: dict[str, float] = {}

    def look(self) -> list[Picture]:
        """A picture of each. Blocks as long as the slowest takes to answer, some seconds at most."""
        return [self._picture(heard) for heard in self._places.ask()]

    def _picture(self, heard: Heard) -> Picture:
        if heard.samples is None:
            since_s = self._down_since_s.setdefault(heard.url, heard.at_s)
            return Picture(heard.url, heard.problem, since_s, False, None, None, None)
        was_down = self._down_since_s.pop(heard.url, None) is not None
        facts = facts_of(heard.samples)
        assert facts is not None  # it would be a problem
        before = self._last.get(heard.url)
        self._last[heard.url] = heard.at_s, heard.samples
        tenants = self._tenants(heard.url) if facts.kind == POOL and self._places.token is not None else None
        gained = None if before is None else heard.samples.since(before[1])
        restarted = before is not None and gained is None
        rates = None
        if before is not None and gained is not None and not was_down:
            passed_s = heard.at_s - before[0]
            of_interval = facts_of(gained)
            if of_interval is not None and 0 < passed_s < _LONG_AGO * max(1.0, self._interval_s):
                rates = _rates(of_interval, passed_s)
        return Picture(heard.url, None, None, restarted, facts, rates, tenants)

    def _tenants(self, url: str) -> dict[str, Any] | None:
        """Observers hear no figures of single tenants, and a pool of an earlier release knows of no such page."""
        parts = urlsplit(url)
        try:
            page = get(f"{parts.scheme}://{parts.netloc}/tenants", ca=self._places.ca, token=self._places.token)
            tenants = json.loads(page).get("tenants")
        except (KvtierError, ValueError, AttributeError):
            return None
        return tenants if isinstance(tenants, dict) else None


def _rates(gained: Facts, seconds: float) -> Rates:
    """:param gained: facts of what counters gained in so many seconds."""
    rate = gained.hit_rate
    return Rates(
        seconds,
        rate,
        tiers={name: _tier_rates(tier, seconds) for name, tier in gained.tiers.items()},
        asked_per_s=rate.asked / seconds,
        hit_per_s=sum(rate.by_tier.values()) / seconds,
        trouble_per_s={words: count / seconds for words, count in gained.trouble.items()},
    )


def _tier_rates(gained: TierFacts, seconds: float) -> TierRates:
    def per_s(amount: float | None) -> float | None:
        return None if amount is None else amount / seconds

    return TierRates(
        lookups_per_s=per_s(gained.looked_up),
        found_share=(gained.found or 0.0) / gained.looked_up if gained.looked_up else None,
        read_bytes_per_s=per_s(gained.bytes_read),
        written_bytes_per_s=per_s(gained.bytes_written),
        evicted_per_s=per_s(gained.evicted_blocks),
    )
