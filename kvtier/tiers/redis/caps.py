"""The most that tenants may have in a Redis which many pools share: whoever writes keeps the books, and makes room."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import redis

from kvtier.clock import MONOTONIC
from kvtier.codec.stored_form import HEADER_BYTES
from kvtier.identity.keys import TENANT_ID_BYTES, StoreKey, TenantId
from kvtier.system.quiet_log import QuietLog
from kvtier.tiers.base import WriteStatus
from kvtier.tiers.redis.cap_script import GRACE_S, NUM_BOOKS, UNIT_BYTES, BookChange, book_name, book_of, units_of
from kvtier.tiers.redis.commands import key_name
from kvtier.tiers.redis.exchange import Conversation, is_full
from kvtier.tiers.redis.servers import Servers

_log = logging.getLogger(__name__)

_MAX_KEYS = 4096
"""Blocks that are told to books at a time: about 500 for each script, which takes 2 ms of the server."""
_MAX_NOTED = 512
"""Blocks of one book that were read lately, and of which it has not been told, about 300 bytes each. There are as many
such books as are read from within `GRACE_S`."""


class TenantCaps:
    """Keeps tenants that have a cap within it. Any thread. Costs nothing for those that have none.

    All pools that write for a tenant have to know its cap: what others write counts only when it is offered again. See
    docs/adr/0028-caps-in-redis.md.
    """

    def __init__(
        self,
        servers: Servers,
        max_value_bytes: int,
        remove: Callable[[Sequence[StoreKey], Sequence[StoreKey], float], None],
        on_refusal: Callable[[Exception], None],
    ) -> None:
        """
        :param max_value_bytes: payload bytes in one value.
        :param remove: removes blocks from their servers, of one value and of any number, until a deadline (monotonic).
        :param on_refusal: told when a server does not let books be kept.
        """
        self._servers = servers
        self._value_units = (max_value_bytes + HEADER_BYTES) // UNIT_BYTES
        """Rounded down: a block of so many units has no second value."""
        self._remove = remove
        self._on_refusal = on_refusal
        self._too_large = QuietLog(_log)
        self._lock = threading.Lock()
        self._most_units: Mapping[TenantId, int] = {}
        """The cap of each book of a tenant that has one. Replaced as a whole."""
        self._noted: OrderedDict[bytes, dict[StoreKey, float]] = OrderedDict()
        """Blocks that were read, and when (monotonic), by the names of their books. Blocks and books that were read
        last are last. Guarded by _lock."""

    def set(self, caps: Mapping[TenantId, int]) -> None:
        """Sets how many bytes each of these tenants may have from now on; all others have no cap.

        A cap that is lowered is reached as its tenant writes. Books do not learn any more of what was read before.
        """
        with self._lock:
            self._noted.clear()
        self._most_units = {tenant: cap_bytes // NUM_BOOKS // UNIT_BYTES for tenant, cap_bytes in caps.items()}

    def note_reads(self, keys: Sequence[StoreKey]) -> None:
        """These blocks were read. Their books learn of it when their tenants next write, if that is soon."""
        caps = self._most_units
        capped = [(key, _book_name(key)) for key in keys if key[:TENANT_ID_BYTES] in caps]
        if not capped:
            return
        now = MONOTONIC()
        with self._lock:
            for key, name in capped:
                of_book = self._noted.setdefault(name, {})
                self._noted.move_to_end(name)
                of_book.pop(key, None)
                of_book[key] = now
                if len(of_book) > _MAX_NOTED:
                    del of_book[next(iter(of_book))]
            while next(reversed(next(iter(self._noted.values())).values())) <= now - GRACE_S:
                self._noted.popitem(last=False)

    def make_room(self, keys: Sequence[StoreKey], sizes: Sequence[int], deadline: float) -> dict[int, WriteStatus]:
        """Enters blocks that are about to be written, and removes what is too much then.

        :param sizes: payload bytes of each.
        :return: the answers for those that must not be written, by place.
        """
        statuses: dict[int, WriteStatus] = {}
        for places in _runs(len(keys)):
            statuses |= self._make_room(keys, sizes, places, deadline)
        return statuses

    def _make_room(
        self, keys: Sequence[StoreKey], sizes: Sequence[int], of: range, deadline: float
    ) -> dict[int, WriteStatus]:
        changes: dict[bytes, BookChange] = {}
        places: dict[bytes, list[int]] = {}
        for place in of:
            if (change := self._change_of(keys[place], changes)) is not None:
                places.setdefault(change.name, []).append(place)
                change.added.append((keys[place], units_of(sizes[place] + HEADER_BYTES)))
                if change.added[-1][1] > change.most_units:
                    self._too_large.warning(
                        f"a block of {sizes[place]:,} bytes is not written: with its head it is more than "
                        f"{change.most_units * UNIT_BYTES:,}, an eighth of its tenant's cap in Redis; raise cap_bytes "
                        "in [tenants.NAME.redis]"
                    )
        if not changes:
            return {}
        for change in changes.values():
            change.used += self._take_noted(change.name)
        self._keep(changes, deadline)
        statuses: dict[int, WriteStatus] = {}
        for name, change in changes.items():
            statuses.update(zip(places[name], _statuses(change), strict=True))
        return {place: status for place, status in statuses.items() if status is not WriteStatus.STORED}

    def forget(self, keys: Sequence[StoreKey], deadline: float) -> list[StoreKey]:
        """These blocks are about to be removed: they count no more. Returns those whose books say that they know."""
        told: list[StoreKey] = []
        for places in _runs(len(keys)):
            changes: dict[bytes, BookChange] = {}
            for key in keys[places.start : places.stop]:
                if (change := self._change_of(key, changes)) is not None:
                    change.gone.append(key)
            self._keep(changes, deadline)
            told += [key for change in changes.values() if isinstance(change.answer, list) for key in change.gone]
        return told

    def take_back(self, keys: Sequence[StoreKey], deadline: float) -> None:
        """These blocks were not written, as far as anybody knows: they count no more, and go if they are there. Where
        a book cannot be told they count on, and may stay."""
        if told := self.forget(keys, deadline):
            self._remove([], told, deadline)

    def _change_of(self, key: StoreKey, changes: dict[bytes, BookChange]) -> BookChange | None:
        """The change of the block's book, begun if need be; None where its tenant has no cap."""
        most_units = self._most_units.get(TenantId(key[:TENANT_ID_BYTES]))
        if most_units is None:
            return None
        name = _book_name(key)
        return changes.setdefault(name, BookChange(name, most_units))

    def _take_noted(self, name: bytes) -> list[StoreKey]:
        """What was read lately of a book; what was longer ago may have been removed since."""
        with self._lock:
            noted = self._noted.pop(name, {})
        since = MONOTONIC() - GRACE_S
        return [key for key, read_at in noted.items() if read_at > since]

    def _keep(self, changes: Mapping[bytes, BookChange], deadline: float) -> None:
        """Makes all changes, and removes what they name."""
        self._ask(list(changes.values()), deadline, in_full=False)
        unknown = [change for change in changes.values() if isinstance(change.answer, redis.exceptions.NoScriptError)]
        self._ask(unknown, deadline, in_full=True)
        small, others = list[StoreKey](), list[StoreKey]()
        for change in changes.values():
            tenant = bytes.fromhex(change.name[-2 * TENANT_ID_BYTES :].decode())
            if isinstance(change.answer, list):
                small += [StoreKey(tenant + member) for member in change.answer[0]]
                others += [StoreKey(tenant + member) for member in change.answer[1]]
            elif isinstance(change.answer, Exception):
                self._on_refusal(change.answer)
        if small or others:
            self._remove(small, others, deadline)

    def _ask(self, changes: Sequence[BookChange], deadline: float, *, in_full: bool) -> None:
        def work(talk: Conversation, batch: list[int]) -> list[int]:
            def take(i: int, answer: Any) -> None:
                changes[batch[i]].answer = answer

            commands = [changes[number].command(self._value_units, in_full=in_full) for number in batch]
            return [batch[i] for i in talk.ask(commands, take, lambda refusal: True)]

        self._servers.each("write", [change.name for change in changes], [0] * len(changes), work, deadline)


def _runs(count: int) -> Iterator[range]:
    """The places from 0 on, in runs that are told to books at a time."""
    return (range(start, min(start + _MAX_KEYS, count)) for start in range(0, count, _MAX_KEYS))


def _statuses(change: BookChange) -> list[WriteStatus]:
    """What becomes of the blocks that a change adds; STORED: they may be written."""
    if not isinstance(change.answer, list):
        answer = WriteStatus.FULL if is_full(change.answer) else WriteStatus.FAILED
        return [answer] * len(change.added)
    refused = set(change.answer[2])
    return [WriteStatus.FULL if key[TENANT_ID_BYTES:] in refused else WriteStatus.STORED for key, _ in change.added]


def _book_name(key: StoreKey) -> bytes:
    return book_name(TenantId(key[:TENANT_ID_BYTES]), book_of(key_name(key)))
