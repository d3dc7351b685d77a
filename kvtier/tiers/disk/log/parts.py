"""A batch in parts, several of which are on their way to or from the drive at once."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from kvtier.identity.keys import TenantId
from kvtier.tiers.common.lent_memory import LentMemory
from kvtier.tiers.disk.medium.io_threads import IoThreads
from kvtier.tiers.disk.medium.watch import HangWatch

_Part = TypeVar("_Part")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Done(Generic[_Part, _Answer]):
    """What became of the parts of a batch."""

    answers: list[_Answer]
    """The answers of the parts that were done, in order."""
    late: "list[Future[Any]]"
    """Parts that are under way still, as the medium hangs."""
    cancelled: list[_Part]
    """Parts that were not begun, and never will be, for the same reason."""


class BatchThreads:
    """Threads for the parts of batches. Any thread."""

    def __init__(self, threads: IoThreads, watch: HangWatch) -> None:
        """Both stay the caller's."""
        self._threads = threads
        self._watch = watch

    @property
    def hang(self) -> bool:
        """Whether nothing should be begun now."""
        return self._watch.hangs()

    def each(
        self,
        work: Callable[[_Part], _Answer],
        parts: Iterable[_Part],
        owner: Callable[[_Part], TenantId],
        lent: LentMemory,
    ) -> Done[_Part, _Answer]:
        """`work` of each part. All are done when it returns or raises, unless the medium hangs.

        :param owner: whose a part is; the parts of tenants take turns.
        :param lent: what the parts use; it is told of those that are under way still.
        """
        given: list[tuple[_Part, Future[_Answer]]] = []
        late: list[Future[Any]] = []
        try:
            for part in parts:
                given.append((part, self._threads.submit(partial(work, part), owner(part))))
        finally:
            left = self._watch.wait([future for _, future in given])
            late = [future for future in left if not future.cancel()]
            lent.keep(late)
        is_late = set(map(id, late))
        answers = [f.result() for _, f in given if id(f) not in is_late and not f.cancelled()]
        return Done(answers, late, [part for part, future in given if future.cancelled()])
