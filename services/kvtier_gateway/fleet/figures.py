"""What a simulation has measured."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from kvtier_gateway.fleet.engine import SimEngine
from kvtier_gateway.fleet.request import SimRequest

WINDOW_S = 60.0
DEFINITIONS = {
    "ttft_p50_s": "time to first token from arrival at the gateway; the first tenth of the requests is not counted",
    "max_over_mean_load": "requests under way at the busiest engine over the mean of all engines, in windows of a "
    "minute; the mean over windows, each weighed by its load",
    "least_max_over_mean_load": "what that is at least wherever requests are served, each by one engine, and as long "
    "under way as they were: in every window the busiest engine has the mean, or the longest request if that is more",
    "regret": "seconds that a request took longer than was predicted for the best other engine; mean over all requests",
}


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one run, or means over runs with different seeds."""

    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    max_over_mean_load: float
    least_max_over_mean_load: float
    fetched_bytes: float
    computed_tokens: float
    regret: float | None
    """None: the strategy predicts nothing."""

    def plain(self) -> dict[str, Any]:
        """Returns the figures by name, for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


class Figures:
    """Takes in what happens in one run."""

    def __init__(self, num_engines: int) -> None:
        self._ttfts: list[tuple[int, float]] = []
        self._regrets: list[float] = []
        self._under_way = [0] * num_engines
        self._changed_s = [0.0] * num_engines
        self._windows: list[list[float]] = []
        """Request-seconds of each engine, by window."""
        self._longest: dict[int, float] = {}
        """Seconds of the longest request in each window."""
        self._fetched_bytes = self._computed_tokens = 0

    def first_token(self, request: SimRequest) -> None:
        """A request has its first token."""
        ttft_s, choice = request.first_token_s - request.arrives_s, request.choice
        self._ttfts.append((request.number, ttft_s))
        if choice is not None and choice.alternative_s is not None:
            self._regrets.append(max(0.0, ttft_s - choice.alternative_s))

    def change(self, place: int, by: int, now_s: float) -> None:
        """An engine has more or fewer requests under way."""
        start_s = self._changed_s[place]
        while start_s < now_s and self._under_way[place]:
            window = int(start_s // WINDOW_S)
            while len(self._windows) <= window:
                self._windows.append([0.0] * len(self._under_way))
            end_s = min(now_s, (window + 1) * WINDOW_S)
            self._windows[window][place] += (end_s - start_s) * self._under_way[place]
            start_s = end_s
        self._changed_s[place] = now_s
        self._under_way[place] += by

    def finished(self, request: SimRequest, now_s: float) -> None:
        """A request is not under way any more."""
        start_s = request.arrives_s
        while start_s < now_s:
            window = int(start_s // WINDOW_S)
            end_s = min(now_s, (window + 1) * WINDOW_S)
            self._longest[window] = max(self._longest.get(window, 0.0), end_s - start_s)
            start_s = end_s

    def end(self, now_s: float, engines: Iterable[SimEngine]) -> None:
        """The run is over."""
        for engine in engines:
            self._fetched_bytes += engine.fetched_bytes
            self._computed_tokens += engine.computed_tokens

    def summary(self) -> Summary:
        """The figures."""
        counted = sorted(ttft_s for number, ttft_s in self._ttfts if number >= len(self._ttfts) // 10)
        loads = [(max(window), sum(window) / len(window)) for window in self._windows if any(window)]
        least = [max(self._longest.get(i, 0.0), sum(w) / len(w)) for i, w in enumerate(self._windows) if any(w)]
        mean_load = sum(mean for _, mean in loads) or 1.0
        return Summary(
            ttft_p50_s=counted[int(0.5 * len(counted))],
            ttft_p90_s=counted[int(0.9 * len(counted))],
            ttft_p99_s=counted[int(0.99 * len(counted))],
            max_over_mean_load=sum(highest for highest, _ in loads) / mean_load,
            least_max_over_mean_load=sum(least) / mean_load,
            fetched_bytes=self._fetched_bytes,
            computed_tokens=self._computed_tokens,
            regret=sum(self._regrets) / len(self._regrets) if self._regrets else None,
        )


def mean(summaries: Sequence[Summary]) -> Summary:
    """The mean of each figure."""
    regrets = [summary.regret for summary in summaries if summary.regret is not None]
    return Summary(
        ttft_p50_s=fmean(summary.ttft_p50_s for summary in summaries),
        ttft_p90_s=fmean(summary.ttft_p90_s for summary in summaries),
        ttft_p99_s=fmean(summary.ttft_p99_s for summary in summaries),
        max_over_mean_load=fmean(summary.max_over_mean_load for summary in summaries),
        least_max_over_mean_load=fmean(summary.least_max_over_mean_load for summary in summaries),
        fetched_bytes=fmean(summary.fetched_bytes for summary in summaries),
        computed_tokens=fmean(summary.computed_tokens for summary in summaries),
        regret=fmean(regrets) if regrets else None,
    )
