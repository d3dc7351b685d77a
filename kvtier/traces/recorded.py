"""Makes requests of what a cache was asked, one call after the other."""

from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.traces.form import Recorded, Request, Trace
from kvtier.traces.records import Kind, Record, read_records

_POLL_S = 10.0
"""Engines ask again while a request waits. Asked again within this time, with nothing done since, it is no new one."""
_PENDING_S = 600.0
"""Reads of a lookup's blocks belong to it within this time after it."""


class RequestMaker:
    """Makes requests of records: a lookup is a request, and so is a read of blocks that nobody had looked up.

    Writes are kept beside, as what was added: the blocks of an answer are asked for by the next turn only.
    """

    def __init__(self) -> None:
        self._asked: dict[int, float] = {}
        """Keys that were looked up, and neither read nor written since, with the time; oldest first."""

    def request(self, record: Record, tenant: int) -> Request | None:
        """What the record adds to the trace. None: it belongs to a request that is there. Amortised O(keys)."""
        now_s, keys = record.time_s, record.keys
        self._forget(now_s - _PENDING_S)
        if record.kind is Kind.LOOKUP:
            is_new = any(now_s - self._asked.get(key, -_PENDING_S) > _POLL_S for key in keys)
            for key in keys:
                self._asked.pop(key, None)
                self._asked[key] = now_s
            return Request(now_s, keys, 0, tenant) if is_new else None
        if record.kind is Kind.READ:
            keys = [key for key in keys if key not in self._asked]
        for key in record.keys:
            self._asked.pop(key, None)
        return Request(now_s, keys, 0, tenant, is_write=record.kind is Kind.WRITE) if keys else None

    def _forget(self, until_s: float) -> None:
        while self._asked and self._asked[oldest := next(iter(self._asked))] < until_s:
            del self._asked[oldest]


class _Intake:
    """Takes records one by one: numbers keys and tenants as they come, and counts. One thread."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.num_dropped = 0
        self._maker = RequestMaker()
        self._tenants: dict[bytes, int] = {}
        self._num_sized = 0
        """Writes that say how large their blocks are."""
        self._sized_bytes = 0
        """The sum of what they say."""

    @property
    def block_bytes(self) -> int | None:
        """The mean of the sizes of written blocks."""
        return round(self._sized_bytes / self._num_sized) if self._num_sized else None

    def take(self, record: Record) -> Request | None:
        """What the record adds to the trace. None: it adds no request. Amortised O(keys)."""
        if record.kind is Kind.DROPPED:
            self.num_dropped += record.nbytes
            return None
        if record.kind is Kind.WRITE and record.nbytes:
            self._num_sized += len(record.keys)
            self._sized_bytes += record.nbytes * len(record.keys)
        numbers = self.numbers
        keys = [numbers.setdefault(key, len(numbers)) for key in record.keys]
        tenant = self._tenants.setdefault(record.tenant, len(self._tenants))
        return self._maker.request(record._replace(keys=keys), tenant)


def read_recorded(path: Path) -> Trace:
    """A trace that a pool or an engine recorded. Raises `ConfigError` when it cannot be read. 1 us a reference."""
    head, records = read_records(path)
    intake = _Intake()
    requests = [request for record in records if (request := intake.take(record)) is not None]
    if not requests:
        raise ConfigError(f"{path} has no request in it: record while the cache is used")
    nbytes = intake.block_bytes
    return Trace(
        path.name,
        requests,
        len(intake.numbers),
        block_bytes=nbytes,
        recorded=_recorded(head.get("policy"), head.get("capacity_blocks"), head.get("capacity_bytes"), nbytes),
        num_dropped=intake.num_dropped,
    )


def _recorded(policy: object, blocks: object, nbytes: object, block_bytes: int | None) -> Recorded | None:
    if not isinstance(blocks, int) and isinstance(nbytes, int) and block_bytes:
        blocks = nbytes // block_bytes
    return Recorded(str(policy), blocks) if isinstance(blocks, int) and blocks > 0 else None
