"""Blocks that requests want kept: asks the pool to pin them, once they are there."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.clock import MONOTONIC, Clock
from kvtier.identity.keys import BlockKey, NamespaceId, StoreKey, TenantId, rank_keys, split_block_key

_log = logging.getLogger(__name__)
_PATIENCE_S = 30.0
"""How long blocks may take to the pool."""
_FIRST_PAUSE_S = 0.05
"""Seconds before the pool is asked again; the pause doubles each time."""
_MAX_WAITING = 64
"""Prompts of a tenant; what more of them wait is not pinned."""


@dataclass(slots=True)
class _Wanted:
    """Blocks of one prompt that are to be pinned. The thread's own once it has taken it."""

    keys: list[BlockKey]
    ttl_s: float
    until_s: float
    at_s: float
    pause_s: float = _FIRST_PAUSE_S

    @property
    def tenant(self) -> TenantId:
        return split_block_key(self.keys[0])[0]


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
        self._waiting: dict[BlockKey, _Wanted] = {}
        """Prompts to pin, each by its last block, which stands for all before it. Guarded by _changed."""
        self._closed = False
        """Guarded by _changed."""
        self._thread = threading.Thread(target=self._run, name="kvtier-pins", daemon=True)
        self._thread.start()

    def ask(self, keys: Sequence[BlockKey], ttl_s: float) -> None:
        """Has a prompt's blocks pinned, with the parts of all ranks, as soon as the pool has them.

        One tenant's wishes leave room for those of others.
        """
        if not keys:
            return
        now = self._clock()
        wanted = _Wanted(list(keys), ttl_s, now + _PATIENCE_S, now)
        with self._changed:
            known = self._waiting.get(keys[-1])
            if known is not None:
                wanted.ttl_s = max(ttl_s, known.ttl_s)
            elif sum(other.tenant == wanted.tenant for other in self._waiting.values()) >= _MAX_WAITING:
                _log.warning("%d prompts of a tenant wait to be pinned: another one of it is not", _MAX_WAITING)
                return
            self._waiting[keys[-1]] = wanted
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread, at most after the deadline of one call."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (wanted := self._next()) is not None:
            of_ranks = [key for namespace in self._namespaces for key in rank_keys(wanted.keys, namespace)]
            try:
                num_pinned = self._pin(of_ranks, wanted.ttl_s)
            except Exception:  # tiers do not raise; a bug in one must not end the thread
                _log.exception("pinning %d blocks failed", len(of_ranks))
                continue
            now = self._clock()
            if num_pinned == len(of_ranks) or now >= wanted.until_s:
                continue  # what is missing is counted where it was asked for
            wanted.at_s, wanted.pause_s = now + wanted.pause_s, 2 * wanted.pause_s
            with self._changed:
                self._waiting.setdefault(wanted.keys[-1], wanted)

    def _next(self) -> _Wanted | None:
        """The one that is due first, when it is; None at the end."""
        with self._changed:
            while not self._closed:
                first = min(self._waiting.values(), key=lambda wanted: wanted.at_s, default=None)
                wait_s = None if first is None else first.at_s - self._clock()
                if first is not None and wait_s is not None and wait_s <= 0:
                    return self._waiting.pop(first.keys[-1])
                self._changed.wait(wait_s)
            return None
