"""Whether a disk tier goes past the page cache: as it was told, or as a short measurement at start says."""

import enum
import logging
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvtier.clock import MONOTONIC, Clock
from kvtier.errors import ConfigError, InvalidInputError
from kvtier.memory.pages import map_memory
from kvtier.tiers.disk.medium.files import PROBE, FileLayer, OsFiles, supports_direct
from kvtier.tiers.disk.medium.folder import MARKER
from kvtier.tiers.disk.medium.health import NOT_ALLOWED_ERRNOS

_log = logging.getLogger(__name__)
_SCRATCH_BYTES, _DEPTH = 2 << 20, 4
"""Read in as many pieces, all at once, as the tier reads."""
_ROUNDS, _BUDGET_S = 4, 0.08
_MUCH = 1.25
"""So many times as long is slower; less is noise."""


class DirectIo(enum.Enum):
    """Whether payloads go past the page cache (O_DIRECT)."""

    AUTO = "auto"
    """Where the file system can, and it is not slower."""
    ON = "on"
    OFF = "off"

    @classmethod
    def parse(cls, name: str) -> "DirectIo":
        """Raises `InvalidInputError` that lists what there is."""
        try:
            return cls(name)
        except ValueError:
            known = ", ".join(choice.value for choice in cls)
            raise InvalidInputError(f"unknown direct_io {name!r}: known are {known}") from None


@dataclass(frozen=True, slots=True)
class ReadTimes:
    """Seconds of the fastest cold read of the scratch file."""

    direct_s: float
    buffered_s: float

    @property
    def favour_direct(self) -> bool:
        """It also keeps blocks from being in memory twice, so a tie is its."""
        return self.direct_s <= _MUCH * self.buffered_s


def goes_direct(folder: str, wanted: DirectIo) -> bool:
    """What a tier in this folder, which it owns, is to do. Logs why.

    Raises `ConfigError` when it must be direct and cannot, `OSError` when the folder may not be written. A measurement
    that fails is none.
    """
    if wanted is DirectIo.OFF:
        return False
    can = _allowed(folder)
    if wanted is DirectIo.ON and not can:
        raise ConfigError(f"disk tier folder {folder}: its file system has no O_DIRECT; set direct_io to auto or off")
    if wanted is DirectIo.ON or not can:
        _log.info("disk tier folder %s: %s the page cache (O_DIRECT)", folder, "past" if can else "cannot go past")
        return can
    try:
        times = measure(Path(folder, PROBE), OsFiles(direct=True), OsFiles(direct=False))
    except OSError as error:
        _log.info("disk tier folder %s: past the page cache (O_DIRECT), not measured: %s", folder, error)
        return True
    if times is None:
        _log.info("disk tier folder %s: past the page cache (O_DIRECT), too slow to be measured", folder)
        return True
    _log.info(
        "disk tier folder %s: %s the page cache (O_DIRECT): %d MiB are read in %.2f ms past it, %.2f ms through it",
        folder, "past" if times.favour_direct else "not past", _SCRATCH_BYTES >> 20,
        1e3 * times.direct_s, 1e3 * times.buffered_s,
    )  # fmt: skip
    return times.favour_direct


def measure(path: Path, direct: FileLayer, buffered: FileLayer, clock: Clock = MONOTONIC) -> ReadTimes | None:
    """Cold reads of a scratch file, which has no name meanwhile; None when time is up before both have been timed.

    Reads, because those are what requests wait for: a write through the page cache looks fast until memory is full.
    Takes about 0.1 s at the most, if 2 MiB can be read in half of it. `OSError`.
    """
    ends_at = clock() + _BUDGET_S
    with ExitStack() as stack:
        fd = direct.create(str(path), _SCRATCH_BYTES)
        stack.callback(direct.close, fd)
        try:
            other_fd = buffered.open(str(path), writable=False)
        finally:
            direct.remove(str(path))
        stack.callback(buffered.close, other_fd)
        memory = map_memory(_SCRATCH_BYTES, prefault=True)
        memory[:] = os.urandom(_SCRATCH_BYTES)  # zeros are no work for some file systems
        direct.write(fd, [memory], 0)
        executor = stack.enter_context(ThreadPoolExecutor(_DEPTH, thread_name_prefix="kvtier-direct-io"))
        fastest = {direct: math.inf, buffered: math.inf}
        for _ in range(_ROUNDS):
            for layer, own_fd in ((direct, fd), (buffered, other_fd)):
                if clock() > ends_at:
                    break
                os.posix_fadvise(other_fd, 0, 0, os.POSIX_FADV_DONTNEED)
                start = clock()
                _read(executor, layer, own_fd, memory)
                fastest[layer] = min(fastest[layer], clock() - start)
    times = ReadTimes(fastest[direct], fastest[buffered])
    return times if math.isfinite(max(times.direct_s, times.buffered_s)) else None


def _read(executor: ThreadPoolExecutor, layer: FileLayer, fd: int, memory: memoryview) -> None:
    step = len(memory) // _DEPTH
    starts: Sequence[int] = range(0, len(memory), step)
    list(executor.map(lambda at: layer.read(fd, [memory[at : at + step]], at), starts))


def _allowed(folder: str) -> bool:
    try:
        return supports_direct(folder)
    except OSError as error:
        if error.errno in NOT_ALLOWED_ERRNOS:
            raise
    try:  # a disk that takes nothing is read all the same
        os.close(OsFiles(direct=True).open(os.path.join(folder, MARKER)))
    except OSError:
        return False
    return True
