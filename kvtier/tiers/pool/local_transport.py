"""The pool on this host: its memory where that works, its Unix socket for everything else."""

import logging
from collections.abc import Collection, Iterator, Sequence

from kvtier.clock import MONOTONIC, Clock
from kvtier.errors import CorruptBlockError, KvtierError, SealedBlockError
from kvtier.identity.keys import StoreKey
from kvtier.metrics import Metrics
from kvtier.protocol.retention import PinStatus
from kvtier.system.quiet_log import QuietLog
from kvtier.tiers.base import Item, Status, Usage, WriteStatus
from kvtier.tiers.lease import Lease
from kvtier.tiers.pool.carried import Incoming, Outgoing
from kvtier.tiers.pool.path_counts import PathCounts
from kvtier.tiers.pool.pause import PAUSE_S, Pause
from kvtier.tiers.pool.shared_memory.client import PoolMemory
from kvtier.tiers.pool.socket_transport import SocketTransport

_log = logging.getLogger(__name__)


class LocalTransport:
    """`PoolTransport` of a pool that may share its memory. Any thread.

    Reads what lies in the pool's memory from there, and the rest, which the pool has to fetch from below, over the
    socket. Whatever fails with memory is tried over the socket within the same deadline.
    """

    def __init__(self, socket: SocketTransport, *, metrics: Metrics, clock: Clock = MONOTONIC) -> None:
        """:param socket: over a Unix socket; owned from now on."""
        self._socket = socket
        self._memory = PoolMemory(socket.open_connection)
        self._counts = PathCounts("shm", metrics)
        self._pause = Pause(clock)
        """The pause of the mapped memory: until it is over, the socket does everything."""
        self._lease_pause = Pause(clock)
        """The pause of leases alone: while it lasts, a pool that hangs is waited for in `read` and not in `lease`."""
        self._failed = QuietLog(_log)

    @property
    def memory(self) -> PoolMemory:
        """The mapped memory by itself, for measurements."""
        return self._memory

    def connect(self) -> None:
        """Opens a connection of the socket ahead of the first call. Blocks until it is open; raises as the verbs do."""
        self._socket.connect()

    def lookup(self, keys: Sequence[StoreKey], timeout_s: float) -> list[Status]:
        """Asks over the socket for a status per key, in order."""
        return self._socket.lookup(keys, timeout_s)

    def read(
        self, keys: Sequence[StoreKey], into: Sequence[Incoming], timeout_s: float
    ) -> Iterator[tuple[int, CorruptBlockError | None]]:
        """Yields the index of each block that arrived, and None or its error: from mapped memory, the rest over the
        socket."""
        deadline = MONOTONIC() + timeout_s
        left = dict.fromkeys(range(len(keys)))
        corrupt: list[StoreKey] = []
        num_bytes = 0
        if self._pause.is_over:
            try:
                with self._counts.timed("read"):
                    for i, error in self._memory.read(keys, into, deadline):
                        del left[i]
                        if error is None:
                            num_bytes += len(into[i])
                        elif not isinstance(error, SealedBlockError):
                            corrupt.append(keys[i])
                        yield i, error
            except OSError as error:
                _log.debug("the pool did not answer: %s", str(error))
            except KvtierError as error:
                self._note_failure(error)
            finally:
                self._counts.read_bytes.inc(num_bytes)
        if corrupt:  # its writer broke it, and as long as it is there nobody can store it again
            self._socket.discard(corrupt, max(0.0, deadline - MONOTONIC()))
        rest = list(left)
        if rest:
            remaining_s = max(0.0, deadline - MONOTONIC())
            answers = self._socket.read([keys[i] for i in rest], [into[i] for i in rest], remaining_s)
            yield from ((rest[j], error) for j, error in answers)

    def lease(
        self, keys: Sequence[StoreKey], nbytes: int, ready: Collection[int], timeout_s: float, *, verified: bool
    ) -> Lease | None:
        """Lends blocks in the pool's mapped memory; None where that fails, and during the pause after a failure."""
        if not (self._pause.is_over and self._lease_pause.is_over):
            return None
        try:
            return self._memory.lease(
                keys,
                nbytes,
                ready,
                MONOTONIC() + timeout_s,
                verified=verified,
                on_end=self._counts.read_bytes.inc,
            )
        except OSError as error:
            _log.debug("the pool lends nothing: %s", str(error))
            self._lease_pause.begin()
        except KvtierError as error:
            self._note_failure(error)
        return None

    def write(self, items: Sequence[Item[Outgoing]], timeout_s: float) -> list[WriteStatus]:
        """Writes through mapped memory, and over the socket what failed there; a status per block, in order."""
        deadline = MONOTONIC() + timeout_s
        statuses = [WriteStatus.FAILED] * len(items)
        if self._pause.is_over:
            try:
                with self._counts.timed("write"):
                    statuses = self._memory.write(items, deadline)
            except OSError as error:
                _log.debug("the pool did not answer: %s", str(error))
            except KvtierError as error:
                self._note_failure(error)
        stored = [i for i, status in enumerate(statuses) if status is WriteStatus.STORED]
        self._counts.written_bytes.inc(sum(len(items[i][1]) for i in stored))
        rest = [i for i, status in enumerate(statuses) if status is WriteStatus.FAILED]
        if rest:
            answers = self._socket.write([items[i] for i in rest], max(0.0, deadline - MONOTONIC()))
            for i, status in zip(rest, answers, strict=True):
                statuses[i] = status
        return statuses

    def discard(self, keys: Sequence[StoreKey], timeout_s: float) -> int:
        """Forgets these keys, over the socket; returns how many were there."""
        return self._socket.discard(keys, timeout_s)

    def pin(self, keys: Sequence[StoreKey], ttl_ms: int, timeout_s: float) -> list[PinStatus] | None:
        """Pins blocks, over the socket; a status per key, in order. None: the pool has no pins, which is no failure."""
        return self._socket.pin(keys, ttl_ms, timeout_s)

    def unpin(self, keys: Sequence[StoreKey], timeout_s: float) -> int | None:
        """Ends pins, over the socket; returns how many there were, None when the pool has no pins."""
        return self._socket.unpin(keys, timeout_s)

    def usage(self, timeout_s: float) -> Usage:
        """Asks over the socket how many blocks and bytes this tenant has in the pool's tier that keeps most of them."""
        return self._socket.usage(timeout_s)

    def close(self) -> None:
        """Unmaps the pool's memory and ends the connections. Idempotent."""
        self._memory.close()
        self._socket.close()

    def _note_failure(self, error: Exception) -> None:
        self._pause.begin()
        self._failed.warning(f"the pool's memory cannot be used, its socket for {PAUSE_S:.0f} s instead: {error}")
