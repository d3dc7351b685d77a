"""Blocks that requests want kept: asks the pool to pin them, once they are there."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.clock import MONOTONIC, Clock
from kvtier.keys import BlockKey, NamespaceId, StoreKey, rank_keys

_log = logging.getLogger(__name__)
_PATIENCE_S = 30.0
"""How long blocks may take to the pool."""
_FIRST_PAUSE_S = 0.05
"""Before the pool is asked again; then twice as long each time."""
_MAX_WAITING = 256
"""Requests; what more of them want pinned is not."""


@dataclass(slots=True)
class _Wanted:
    """Blocks of one request that are to be pinned. The thread's own once it has taken it."""

    keys: list[StoreKey]
    ttl_s: float
    until_s: float
    at_s: float
    pause_s: float = _FIRST_PAUSE_S


class Pins:
    """`ask` from any thread, and it does not block; a thread of its own asks the pool."""

    def __init__(
        self,
        pin: Callable[[Sequence[StoreKey], float], int],
        namespaces: Sequence[NamespaceId],
        *,
        clock: Clock = MONOTONIC,
    ) -> None:
        """
        :param pin: see `PoolTier.pin`. Blocks.
        :param namespaces: of all ranks.
        """
        self._pin, self._namespaces, self._clock = pin, list(namespaces), clock
        self._changed = threading.Condition()
        self._waiting: list[_Wanted] = []
        """Guarded by _changed."""
        self._closed = False
        """Guarded by _changed."""
        self._thread = threading.Thread(target=self._run, name="kvtier-pins", daemon=True)
        self._thread.start()

    def ask(self, keys: Sequence[BlockKey], ttl_s: float) -> None:
        """Has these blocks pinned, with the parts of all ranks, as soon as the pool has them."""
        if not keys:
            return
        now = self._clock()
        of_ranks = [key for namespace in self._namespaces for key in rank_keys(keys, namespace)]
        with self._changed:
            if len(self._waiting) < _MAX_WAITING:
                self._waiting.append(_Wanted(of_ranks, ttl_s, now + _PATIENCE_S, now))
                self._changed.notify()
                return
        _log.warning("%d requests wait for their blocks to be pinned: those of another one are not", _MAX_WAITING)

    def close(self) -> None:
        """Ends the thread, at most after the deadline of one call."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (wanted := self._next()) is not None:
            try:
                num_pinned = self._pin(wanted.keys, wanted.ttl_s)
            except Exception:  # tiers do not raise; a bug in one must not end the thread
                _log.exception("pinning %d blocks failed", len(wanted.keys))
                continue
            now = self._clock()
            if num_pinned == len(wanted.keys) or now >= wanted.until_s:
                continue  # what is missing is counted where it was asked for
            wanted.at_s, wanted.pause_s = now + wanted.pause_s, 2 * wanted.pause_s
            with self._changed:
                self._waiting.append(wanted)

    def _next(self) -> _Wanted | None:
        """The one that is due first, when it is; None at the end."""
        with self._changed:
            while not self._closed:
                first = min(self._waiting, key=lambda wanted: wanted.at_s, default=None)
                wait_s = None if first is None else first.at_s - self._clock()
                if first is not None and wait_s is not None and wait_s <= 0:
                    self._waiting.remove(first)
                    return first
                self._changed.wait(wait_s)
            return None
