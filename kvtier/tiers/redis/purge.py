"""Finds all that a Redis has of one tenant."""

import threading
from typing import Any

from kvtier.identity.keys import TenantId
from kvtier.tiers.redis.cap_script import NUM_BOOKS, book_name
from kvtier.tiers.redis.commands import tenant_prefix
from kvtier.tiers.redis.exchange import Conversation

_AT_ONCE = 2000
"""Names that a server looks at for one command: about 1 ms of its time."""


class TenantPurge:
    """Names of values of one tenant, looked for at all servers at a time. Any thread."""

    def __init__(self, tenant: TenantId) -> None:
        self._pattern = tenant_prefix(tenant) + b"*"
        self._books = [book_name(tenant, book) for book in range(NUM_BOOKS)]
        self._lock = threading.Lock()
        self._found: set[bytes] = set()
        """Guarded by _lock."""
        self.num_left = 0
        """Values that a later look has found. Guarded by _lock."""

    @property
    def num_found(self) -> int:
        """Values of blocks, books aside."""
        return len(self._found)

    @property
    def names(self) -> list[bytes]:
        """What is to be removed."""
        return [*self._found, *self._books]

    def find(self, talk: Conversation) -> None:
        """Looks at all names of one server."""
        names = self._scan(talk)
        with self._lock:
            self._found |= names

    def count_left(self, talk: Conversation) -> None:
        """Looks again, after what was found has been removed."""
        names = self._scan(talk)
        with self._lock:
            self.num_left += len(names)

    def _scan(self, talk: Conversation) -> set[bytes]:
        names: set[bytes] = set()
        cursor: Any = 0
        while True:
            answers: dict[int, Any] = {}
            talk.ask([("SCAN", cursor, "MATCH", self._pattern, "COUNT", _AT_ONCE)], answers.__setitem__)
            cursor, found = answers[0]
            names.update(found)
            if not int(cursor):
                return names
