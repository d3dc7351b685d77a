"""An engine's backlog in seconds: the priced work of requests without a token, and how fast the engine really is."""

from dataclasses import dataclass

from kvtier_gateway.routing.values import RequestId

_FORGET = 0.95
_PRIOR_S = 20.0
"""Seconds of computing for which the prices are believed before any was seen."""
_SLOWEST = 10.0


@dataclass(slots=True)
class _Sent:
    fetch_s: float
    compute_s: float
    """Seconds by the prices, not corrected."""
    fetched_at_s: float
    """The time at which the request's blocks are there, if all goes as predicted."""


class Ledger:
    """The work of one engine, which computes prompts one after the other in the order in which it gets them.

    A request leaves the backlog with its first token, whatever was predicted, so that no error adds up. The time from
    one first token to the next, divided by what the prices say, corrects them for decodes and for a slower machine.
    """

    def __init__(self) -> None:
        self._sent: dict[RequestId, _Sent] = {}
        self._compute_s = 0.0
        """The sum over all requests in `_sent`."""
        self._free_since_s = 0.0
        """The time of the last first token, since which the first request in `_sent` could be computed."""
        self._fetches_end_s = 0.0
        self._seen_s = self._predicted_s = _PRIOR_S
        self.slowness = 1.0
        """The time that computing takes, divided by what the prices say."""

    def backlog_s(self, now_s: float) -> float:
        """Returns the seconds until all that has been sent is computed."""
        if not self._sent:
            return 0.0
        first, slowness = next(iter(self._sent.values())), self.slowness
        began_s = max(self._free_since_s, first.fetched_at_s)
        if began_s > now_s:
            return self._compute_s * slowness + began_s - now_s
        return max(0.0, self._compute_s * slowness - min(now_s - began_s, first.compute_s * slowness))

    def fetch_backlog_s(self, now_s: float) -> float:
        """Returns the seconds until all that is being fetched is there."""
        return max(0.0, self._fetches_end_s - now_s)

    def add(self, request: RequestId, fetch_s: float, compute_s: float, now_s: float) -> None:
        """Notes that the request is sent."""
        if not self._sent:
            self._free_since_s = now_s
        self._fetches_end_s = max(now_s, self._fetches_end_s) + fetch_s
        self._sent[request] = _Sent(fetch_s, compute_s, self._fetches_end_s if fetch_s else now_s)
        self._compute_s += compute_s

    def first_token(self, request: RequestId, now_s: float) -> None:
        """Notes that the request is computed, and learns from the time that it took."""
        if (sent := self._remove(request)) is not None:
            seen_s = now_s - max(self._free_since_s, sent.fetched_at_s)
            if seen_s > 0:
                self._seen_s = _FORGET * self._seen_s + min(seen_s, _SLOWEST * sent.compute_s)
                self._predicted_s = _FORGET * self._predicted_s + sent.compute_s
                self.slowness = min(_SLOWEST, self._seen_s / self._predicted_s)
            self._free_since_s = now_s

    def drop(self, request: RequestId) -> None:
        """Takes out a request that will have no token."""
        self._remove(request)

    def _remove(self, request: RequestId) -> _Sent | None:
        sent = self._sent.pop(request, None)
        if sent is not None:
            self._compute_s = self._compute_s - sent.compute_s if self._sent else 0.0
        return sent
