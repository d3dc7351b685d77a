"""How a disk tier works, and what makes no sense."""

import math
from dataclasses import dataclass

from kvtier.codec.sealed_form import StorageSeals
from kvtier.codec.stored_form import Codec
from kvtier.errors import InvalidInputError
from kvtier.tiers.disk.operations.appending import SMALLEST_SEGMENT_BYTES
from kvtier.tiers.disk.state.segment_files import SyncPolicy


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """How a disk tier works. `DiskTier.open` documents the fields and has the defaults."""

    capacity_bytes: int
    reserve_bytes: int
    segment_bytes: int
    sync: SyncPolicy
    codec: Codec
    seals: StorageSeals
    write_amplification: float
    num_threads: int
    timeout_s: float

    def check(self) -> None:
        """Raises `InvalidInputError` when no tier can work so."""
        if (
            self.capacity_bytes < SMALLEST_SEGMENT_BYTES
            or self.reserve_bytes < 0
            or self.num_threads < 1
            or not self.timeout_s > 0
            or self.segment_bytes < SMALLEST_SEGMENT_BYTES
            or not 1 <= self.write_amplification < math.inf
        ):
            raise InvalidInputError(
                f"disk tier of {self.capacity_bytes} bytes, {self}: needs {SMALLEST_SEGMENT_BYTES} bytes, segments of "
                "as many, a thread, a timeout, and a write amplification from 1"
            )
