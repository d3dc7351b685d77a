"""A token bucket: how much of something somebody may have a second, and in a burst."""

_BURST_S = 1.0
"""Somebody who was quiet for so long may have as much at once as he may in this time."""


class TokenBucket:
    """What somebody may have of one thing now. The caller guards it."""

    def __init__(self, per_s: float, now_s: float, burst: float | None = None) -> None:
        """
        :param per_s: how much comes a second.
        :param burst: the most that there is at a time. None: what comes in a second, and at least 1.
        """
        self.per_s = per_s
        self._burst = burst if burst is not None else max(1.0, per_s * _BURST_S)
        self._left = self._burst
        """Negative: what is owed."""
        self._at_s = now_s

    def owed_s(self, wanted: float, now_s: float) -> float:
        """How long it takes until so much is there."""
        self._left = min(self._burst, self._left + (now_s - self._at_s) * self.per_s)
        self._at_s = now_s
        return max(0.0, (wanted - self._left) / self.per_s)

    def take(self, amount: float) -> None:
        """Takes it, whether it is there or not; less than nothing gives back."""
        self._left = min(self._burst, self._left - amount)
