"""Blocks that tiers have by keys of a previous secret of their tenant: how they are found, and what they are called.

A block is looked for under previous secrets when no tier has it under the present one. Its KV depends on tokens alone,
not on the secret, so a load may take some blocks of a prompt by their own keys and others by previous ones. What is
loaded has its own key from then on: the tiers below are owed it, the one that it came from as well.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol, TypeVar

from kvtier.identity.keys import BlockKey, PreviousHasher
from kvtier.offload.messages import HOST
from kvtier.offload.planner import MISSING, PENDING, BlockStatus
from kvtier.tiers.base import Status

_MOST_NAMES = 1 << 16
"""Names that are kept for loads, about 300 bytes each. A block whose name was forgotten is computed."""


@dataclass(frozen=True, slots=True)
class PreviousKeys:
    """What a previous secret makes of the keys of one lookup."""

    hasher: PreviousHasher
    first: Callable[[int], Sequence[BlockKey]]
    """Returns the previous keys of the lookup's first so many keys. Hashes what it has not hashed before."""
    keys_per_block: int = 1
    """How many keys of the lookup, one after the other, are of the same tokens: one per KV group."""


class Question(Protocol):
    """What the tiers below are asked of some keys."""

    @property
    def statuses(self) -> Sequence[BlockStatus]:
        """A status per key, in order, as far as they are known."""


_QuestionT = TypeVar("_QuestionT", bound=Question)


class _Name(NamedTuple):
    key: BlockKey
    hasher: PreviousHasher


class PreviousNames:
    """The previous keys of blocks that lookups have found by them, until a load has brought them. Scheduler thread
    only."""

    def __init__(self) -> None:
        self._names: OrderedDict[BlockKey, _Name] = OrderedDict()
        """The names by the blocks' own keys; those that were found longest ago first."""

    def of(self, key: BlockKey) -> BlockKey | None:
        """Returns the previous key by which tiers have the block; None: there is none, or it may not be used now."""
        name = self._names.get(key)
        return None if name is None or name.hasher.is_retired else name.key

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Forgets blocks that have their own keys now, or were not there. Unknown ones are ignored."""
        for key in keys:
            self._names.pop(key, None)

    def clear(self) -> None:
        """Forgets all names."""
        self._names.clear()

    def search(
        self,
        keys: Sequence[BlockKey],
        statuses: list[BlockStatus],
        previous: Sequence[PreviousKeys],
        ask: Callable[[Sequence[BlockKey]], _QuestionT],
    ) -> Iterator[_QuestionT]:
        """Looks for what is missing under the previous secrets, and puts what it finds into `statuses`.

        The first block that is missing is looked for under each of them, in one question. The newest secret that has it
        is asked for the rest. So a prompt that no tier has costs one key for each secret, and no hash behind that
        block's.

        :param statuses: what is known under the present secret.
        :param ask: begins to ask the tiers below. The iterator gives what it returns, and goes on when that has its
            answers.
        """
        usable = [each for each in previous if not each.hasher.is_retired]
        if not usable:
            return
        size = usable[0].keys_per_block
        start = _first_missing(statuses, size)
        if start is None:
            return
        probe = ask([*chain.from_iterable(each.first(start + size)[start:] for each in usable)])
        yield probe
        found = (
            each for n, each in enumerate(usable) if any(map(_is_below, probe.statuses[n * size : (n + 1) * size]))
        )
        newest = next(found, None)
        if newest is None:
            return
        names = newest.first(len(keys))[start:]
        rest = ask(names)
        yield rest
        for place, (name, status) in enumerate(zip(names, rest.statuses, strict=True), start):
            if statuses[place] is MISSING and _is_below(status):
                statuses[place] = status
                self._note(keys[place], _Name(name, newest.hasher))

    def _note(self, key: BlockKey, name: _Name) -> None:
        self._names[key] = name
        self._names.move_to_end(key)
        if len(self._names) > _MOST_NAMES:
            self._names.popitem(last=False)


def _first_missing(statuses: Sequence[BlockStatus], size: int) -> int | None:
    """Returns where the first block begins of which nothing is known. None: there is none, or it is behind one that is
    on its way, for which the request may wait."""
    for start in range(0, len(statuses), size):
        of_block = statuses[start : start + size]
        if PENDING in of_block:
            return None
        if all(status is MISSING for status in of_block):
            return start
    return None


def _is_below(status: BlockStatus) -> bool:
    """Whether a tier below the arenas has the block. The arenas have blocks by their own keys."""
    return status.status is Status.HIT and status.tier != HOST
