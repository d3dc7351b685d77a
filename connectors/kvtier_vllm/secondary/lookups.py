"""Which chunks the pool has: asked once per schedule, in the background, and answered from what has come."""

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvtier.clock import MONOTONIC, Clock
from kvtier.identity.keys import StoreKey
from kvtier.system.started_threads import started_threads
from kvtier.tiers.base import Status, Tier

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Request:
    """What one request asked for."""

    found: dict[bytes, bool] = field(default_factory=dict)
    """Answers. They hold as long as the request lives: one that was taken back would be asked for for ever."""
    waiting: dict[bytes, float] = field(default_factory=dict)
    """Keys without an answer, and when each counts as missing."""


class Lookups:
    """Lookups of vLLM's requests. Scheduler thread only; nothing but `close` blocks.

    One call to the tier at a time, for all keys that have been asked for since the last one.
    """

    def __init__(
        self,
        tier: Tier,
        store_key: Callable[[bytes], StoreKey],
        *,
        deadline_s: float,
        on_late: Callable[[], None],
        clock: Clock = MONOTONIC,
    ) -> None:
        """
        :param tier: the caller's.
        :param store_key: what the tier calls a key. Called from another thread.
        :param deadline_s: after which what the tier was asked for counts as missing.
        :param on_late: called for each key for which that happens.
        """
        self._tier, self._store_key = tier, store_key
        self._deadline_s, self._on_late, self._clock = deadline_s, on_late, clock
        self._requests: dict[str, _Request] = {}
        self._next: dict[bytes, list[str]] = {}
        """Keys for the next call, and the requests that ask for each."""
        self._asked: dict[bytes, list[str]] = {}
        """Keys of the call under way, and the requests that ask for each."""
        self._call: Future[list[bool]] | None = None
        self._threads = started_threads(1, "kvtier-lookup")

    def ask(self, key: bytes, request_id: str) -> bool | None:
        """Whether the tier has the chunk; None: ask again at the next schedule."""
        self._take_answers()
        request = self._requests.setdefault(request_id, _Request())
        if key in request.found:
            return request.found[key]
        deadline = request.waiting.get(key)
        if deadline is None:
            request.waiting[key] = self._clock() + self._deadline_s
            self._next.setdefault(key, []).append(request_id)
            return None
        if self._clock() < deadline:
            return None
        self._settle(key, request_id, found=False)
        self._on_late()
        return False

    def flush(self) -> None:
        """Asks the tier for what `ask` has collected, unless it is being asked already."""
        self._take_answers()
        if self._call is not None or not self._next:
            return
        self._asked = {key: ids for key, ids in self._next.items() if any(self._waits(id_, key) for id_ in ids)}
        self._next = {}
        if self._asked:
            self._call = self._threads.submit(self._look_up, list(self._asked))

    def mark_missing(self, keys: Iterable[bytes], request_id: str) -> None:
        """Marks chunks as missing for this request, for good: what failed to load would be offered, and fail, for
        ever."""
        for key in keys:
            self._settle(key, request_id, found=False)

    def forget(self, request_id: str) -> None:
        """The request has ended. Unknown ones are ignored."""
        self._requests.pop(request_id, None)

    def close(self) -> None:
        """Waits for the call under way, which the tier's deadline bounds. Idempotent."""
        self._threads.shutdown(cancel_futures=True)

    def _take_answers(self) -> None:
        if self._call is None or not self._call.done():
            return
        for (key, request_ids), found in zip(self._asked.items(), self._call.result(), strict=True):
            for request_id in request_ids:
                if self._waits(request_id, key):
                    self._settle(key, request_id, found=found)
        self._asked, self._call = {}, None

    def _waits(self, request_id: str, key: bytes) -> bool:
        """False when the request has ended, or was answered by its deadline."""
        request = self._requests.get(request_id)
        return request is not None and key in request.waiting

    def _settle(self, key: bytes, request_id: str, *, found: bool) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            request.waiting.pop(key, None)
            request.found[key] = found

    def _look_up(self, keys: Sequence[bytes]) -> list[bool]:
        """Asks the tier, in the lookups' own thread, whether it has these chunks."""
        try:
            statuses = self._tier.lookup([self._store_key(key) for key in keys])
            return [status is Status.HIT for _, status in zip(keys, statuses, strict=True)]
        except Exception:
            # Tiers do not raise. A bug in one must not reach the scheduler, which would end the engine.
            _log.exception("looking up %d chunks in %s failed", len(keys), self._tier.name)
            return [False] * len(keys)
