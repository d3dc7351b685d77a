"""What tests know of a disk tier's folder: where a block lies, how many are there."""

import contextlib
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.identity.keys import StoreKey
from kvtier.tiers.disk.log.buffers import Buffers
from kvtier.tiers.disk.log.format import PAGE, Kind, keys_of
from kvtier.tiers.disk.log.scan import Found, SegmentReader
from kvtier.tiers.disk.medium.files import OsFiles
from kvtier.tiers.disk.medium.folder import list_folder
from kvtier.tiers.disk.operations.survey import survey
from kvtier.tiers.disk.tier import DiskTier


@contextmanager
def opened(folder: Path, capacity_bytes: int = 4 << 20, **options: object) -> Iterator[DiskTier]:
    """A tier that is checked and closed at the end."""
    options.setdefault("reserve_bytes", 0)
    tier = DiskTier.open(folder, capacity_bytes, **options)  # type: ignore[arg-type]
    try:
        yield tier
        tier.check()
    finally:
        tier.close()


def killed(folder: Path, copy: Path) -> Path:
    """The folder as a process would leave it that is killed now: nothing is sealed.

    A segment that is unlinked meanwhile is gone in the copy, too.
    """
    return Path(shutil.copytree(folder, copy, copy_function=_copy_if_there))


def _copy_if_there(source: str, target: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(source, target)


def segments(folder: Path) -> list[Path]:
    """Oldest first."""
    return [folder / f"{number:08x}.segment" for number in list_folder(str(folder)).numbers]


def contents(path: Path) -> Found:
    """What a reader finds in a sound segment."""
    reader = SegmentReader(OsFiles(direct=False), Buffers(1))
    found = reader.inspect(str(path), int(path.stem, 16), writable=False)
    assert isinstance(found, Found), found
    return found


def places(folder: Path) -> dict[StoreKey, tuple[Path, int, int]]:
    """File, offset and stored length of the newest record of every key."""
    newest: dict[StoreKey, tuple[int, tuple[Path, int, int]]] = {}
    for path in segments(folder):
        entries = contents(path).entries
        for index, key in enumerate(keys_of(entries)):
            if entries["kind"][index] == Kind.RECORD:
                place = (path, int(entries["page"][index]) * PAGE, int(entries["header"]["stored_length"][index]))
                newest[key] = max(newest.get(key, (0, place)), (int(entries["epoch"][index]), place))
    return {key: place for key, (_, place) in newest.items()}


def place_of(folder: Path, key: StoreKey) -> tuple[Path, int, int]:
    """The segment, the offset and the length of one key's block."""
    return places(folder)[key]


def overwrite(path: Path, offset: int, data: bytes) -> None:
    """In place: the file keeps its identity for those who have it open."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, offset: int) -> None:
    """One bit."""
    with path.open("rb") as file:
        file.seek(offset)
        (byte,) = file.read(1)
    overwrite(path, offset, bytes([byte ^ 1]))


def damage(folder: Path, key: StoreKey) -> None:
    """Flips a bit in the middle of a block."""
    path, offset, nbytes = place_of(folder, key)
    flip(path, offset + nbytes // 2)


def num_blocks(folder: Path) -> int:
    """How many blocks a start would find; 0 where there is no folder."""
    return len(survey(folder).live) if folder.is_dir() else 0


def used_bytes(folder: Path) -> int:
    """Disk space of all segments; once of a file that has two names for a moment."""
    stats = [path.stat() for path in segments(folder)]
    return sum({stat.st_ino: stat.st_size for stat in stats}.values())


class WeighedFiles(OsFiles):
    """Weighs the folder after each change that takes room, before the next change."""

    def __init__(self, folder: Path) -> None:
        super().__init__(direct=False)
        self.seen: list[int] = []
        """Bytes, each time."""
        self._folder = folder
        self._one_at_a_time = threading.Lock()

    def create(self, path: str, nbytes: int) -> int:
        with self._one_at_a_time:
            fd = super().create(path, nbytes)
            self.seen.append(used_bytes(self._folder))
            return fd

    def truncate(self, fd: int, nbytes: int) -> None:
        with self._one_at_a_time:
            super().truncate(fd, nbytes)

    def remove(self, path: str) -> None:
        with self._one_at_a_time:
            super().remove(path)
