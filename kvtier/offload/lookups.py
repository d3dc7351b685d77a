"""Finds out where blocks are. The shared tier is asked in the background, so that a step never waits for a network."""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kvtier.clock import Clock
from kvtier.identity.keys import BlockKey, NamespaceId, rank_keys
from kvtier.offload.index import BlockIndex
from kvtier.offload.metrics import HierarchyMetrics
from kvtier.offload.planner import MISSING, PENDING, BlockStatus
from kvtier.offload.previous import PreviousKeys, PreviousNames
from kvtier.system.logs import current_request_id, within_request
from kvtier.system.started_threads import started_threads
from kvtier.system.tracing import tracing
from kvtier.tiers.base import Status, Tier

_log = logging.getLogger(__name__)

_NUM_THREADS = 2
"""The number of threads that ask the shared tier."""


class SharedLookups:
    """Looks up blocks for all ranks at once. Scheduler thread only; `ask` does not block."""

    def __init__(
        self,
        tier: Tier,
        namespaces: Sequence[NamespaceId],
        *,
        max_asking: int,
        on_answer: Callable[[], None],
    ) -> None:
        """:param on_answer: called from another thread when an answer has come."""
        self._tier = tier
        self._namespaces = list(dict.fromkeys(namespaces))  # ranks that hold the same have one
        self._max_asking, self._on_answer = max_asking, on_answer
        self._threads = started_threads(_NUM_THREADS, "kvtier-lookup")
        self._asking: set[Future[list[Status]]] = set()

    @property
    def name(self) -> str:
        return self._tier.name

    def ask(self, keys: Sequence[BlockKey]) -> Future[list[Status]] | None:
        """Asks for a status per key: HIT when every namespace has it. None when too many lookups are under way."""
        # Abandoned lookups of a hung tier count until its deadline ends them.
        self._asking = {future for future in self._asking if not future.done()}
        if len(self._asking) >= self._max_asking:
            return None
        future = self._threads.submit(self._lookup_within, tracing.context(), current_request_id(), list(keys))
        self._asking.add(future)
        future.add_done_callback(lambda _: self._on_answer())
        return future

    def close(self) -> None:
        """Waits for the lookups under way, which the tier's deadlines bound."""
        self._threads.shutdown(cancel_futures=True)

    def _lookup_within(self, trace: str, request: str, keys: list[BlockKey]) -> list[Status]:
        with tracing.within(trace), within_request(request):
            return self._lookup(keys)

    def _lookup(self, keys: list[BlockKey]) -> list[Status]:
        of_ranks = [key for namespace in self._namespaces for key in rank_keys(keys, namespace)]
        try:
            answers = [status for _, status in zip(of_ranks, self._tier.lookup(of_ranks), strict=True)]
        except Exception:
            # Tiers do not raise. A bug in one must not reach the scheduler, which would end the engine.
            _log.exception(
                "looking up %d blocks in %s failed",
                len(keys),
                self._tier.name,
                extra={"tier": self._tier.name},
            )
            return [Status.MISS] * len(keys)
        by_namespace = [answers[start : start + len(keys)] for start in range(0, len(answers), len(keys))]
        return [_weakest(statuses) for statuses in zip(*by_namespace, strict=True)]


@dataclass(slots=True)
class _Question:
    """Some keys that the tiers below are asked for."""

    statuses: list[BlockStatus]
    """What the index has said, and then the shared tier."""
    asked: list[int]
    """Indexes that the shared tier is asked about."""
    future: Future[list[Status]] | None


@dataclass(slots=True)
class _Lookup:
    statuses: list[BlockStatus]
    question: _Question | None
    """What is being asked; None when there is nothing more to ask."""
    following: Iterator[_Question]
    """The questions that come after `question`."""
    deadline: float


class Lookups:
    """Lookups by ticket: the index answers at once, the shared tier when it is polled. Scheduler thread only."""

    def __init__(
        self,
        index: BlockIndex,
        shared: SharedLookups | None,
        previous: PreviousNames,
        metrics: HierarchyMetrics,
        *,
        deadline_s: float,
        clock: Clock,
    ) -> None:
        """
        :param shared: closed with this.
        :param previous: told what was found under previous secrets.
        :param deadline_s: seconds after which what the shared tier was asked for counts as missing.
        """
        self._index, self._shared, self._previous, self._metrics = index, shared, previous, metrics
        self._deadline_s, self._clock = deadline_s, clock
        self._open: dict[int, _Lookup] = {}
        """Lookups that are not over, by ticket."""

    def start(self, ticket: int, keys: Sequence[BlockKey], previous: Sequence[PreviousKeys] = ()) -> None:
        """Asks where these blocks are. What is missing then is looked for by its previous keys, if there are any."""
        deadline = self._clock() + self._deadline_s
        question = self._ask(keys)
        following: Iterator[_Question] = iter(())
        if previous:
            following = self._previous.search(keys, question.statuses, previous, self._ask)
        self._open[ticket] = _Lookup(question.statuses, question, following, deadline)

    def poll(self, ticket: int) -> list[BlockStatus] | None:
        """Returns a status per key, in order, which ends the ticket; None while the shared tier is being asked."""
        lookup = self._open[ticket]
        while lookup.question is not None:
            if self._take_answers(lookup.question):
                lookup.question = next(lookup.following, None)
            elif self._clock() < lookup.deadline:
                return None
            else:
                self._metrics.deadlines_missed.labels("lookup").inc()
                lookup.question = None
        del self._open[ticket]
        return lookup.statuses

    def cancel(self, ticket: int) -> None:
        """Ends the ticket without an answer."""
        del self._open[ticket]

    def close(self) -> None:
        """Stops the threads that ask."""
        if self._shared is not None:
            self._shared.close()

    def _ask(self, keys: Sequence[BlockKey]) -> _Question:
        question = _Question([self._index.locate(key) for key in keys], [], None)
        if self._shared is not None:
            question.asked = [i for i, status in enumerate(question.statuses) if status is MISSING]
            if question.asked:
                question.future = self._shared.ask([keys[i] for i in question.asked])
                if question.future is None:
                    self._metrics.lookups_skipped.inc()
        return question

    def _take_answers(self, question: _Question) -> bool:
        """Puts what the shared tier has answered into the statuses; False while it has not."""
        if question.future is None or self._shared is None:
            return True
        if not question.future.done():
            return False
        for index, status in zip(question.asked, question.future.result(), strict=True):
            question.statuses[index] = _found(status, self._shared.name)
        return True


def _found(status: Status, tier: str) -> BlockStatus:
    if status is Status.HIT:
        return BlockStatus(Status.HIT, tier)
    return PENDING if status is Status.PENDING else MISSING


def _weakest(statuses: tuple[Status, ...]) -> Status:
    """Returns the status for all ranks together: a miss if one misses it, else pending if it is pending in one."""
    if Status.MISS in statuses:
        return Status.MISS
    return Status.PENDING if Status.PENDING in statuses else Status.HIT
