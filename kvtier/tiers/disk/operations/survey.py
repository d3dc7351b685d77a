"""Looking at a folder without changing it: what `kvtier inspect` and `kvtier fsck` print."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier.identity.keys import StoreKey
from kvtier.tiers.disk.log.buffers import Buffers
from kvtier.tiers.disk.log.format import PAGE, Entries, Kind, NewerFormatError, keys_of, pages_of
from kvtier.tiers.disk.log.scan import Damaged, Foreign, Found, SegmentReader
from kvtier.tiers.disk.medium.files import FileLayer, OsFiles
from kvtier.tiers.disk.medium.folder import list_folder, segment_name
from kvtier.tiers.disk.medium.health import NOT_ALLOWED_ERRNOS, is_passing
from kvtier.tiers.disk.operations.recovery import Gathered, adopt, decide
from kvtier.tiers.disk.state.log_state import LogState


@dataclass(slots=True)
class SegmentReport:
    """One segment file. Filled by `survey`."""

    number: int
    path: Path
    state: str
    """`sealed`; `open`: without a footer; `damaged`; `foreign`; `newer`: of a format that this release does not read;
    `gone`: removed meanwhile."""
    file_bytes: int
    tenant: str = ""
    """Id of the segment's tenant, hexadecimal."""
    num_live: int = 0
    """Records that a read would find."""
    live_bytes: int = 0
    """Bytes of the live records' payloads, as stored."""
    num_dead: int = 0
    """Records that were discarded, replaced or moved."""
    num_tombstones: int = 0
    num_torn: int = 0
    """Records that are not all there, in a segment without a footer."""
    num_corrupt: int = 0
    """Live records that are not what was stored; counted by `verify` alone."""
    orphaned_bytes: int = 0
    """What belongs to no live record, head or footer: room that eviction will get back."""
    problem: str = ""


@dataclass(slots=True)
class Survey:
    """A whole folder. Filled by `survey`."""

    segments: list[SegmentReport] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    """Names of files that kvtier did not make."""
    corrupt: list[StoreKey] = field(default_factory=list)
    """Keys of live records that are not what was stored; found by `verify` alone."""
    live: list[StoreKey] = field(default_factory=list)
    """Keys of all live records."""

    @property
    def is_sound(self) -> bool:
        """Nothing is damaged. Torn records at the end of the log are not damage: their writes were not over."""
        return not self.corrupt and not any(s.state in ("damaged", "foreign", "newer") for s in self.segments)

    def total(self, name: str) -> int:
        """Sum of a figure over all segments."""
        return sum(getattr(segment, name) for segment in self.segments)


def survey(
    folder: Path,
    *,
    verify: bool = False,
    files: FileLayer | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Survey:
    """Reads every footer, and segments without one whole; with `verify` all payloads. `OSError`.

    It is a picture of some moment, if the folder is in use: what is written or removed meanwhile may be missed.

    :param on_progress: called with the number of segments that were read, and of all of them.
    """
    layer = files if files is not None else OsFiles(direct=False)
    reader, state, result = SegmentReader(layer, Buffers(2)), LogState(), Survey()
    listing = list_folder(str(folder))
    result.foreign = listing.foreign
    gathered: list[tuple[SegmentReport, Found, Gathered]] = []
    for done, number in enumerate(listing.numbers):
        on_progress(done, len(listing.numbers))
        report, content = _look(reader, folder, number)
        result.segments.append(report)
        if content is not None and len(content.entries):
            gathered.append((report, content, adopt(content, state)))
    which = decide([g for _, _, g in gathered], state)
    for (report, content, _), (entries, there) in zip(gathered, which, strict=True):
        _count(report, content, entries, there)
        live = entries[there]
        result.live += keys_of(live)
        if verify and content.sealed:  # without a footer, payloads have been read already
            bad = _bad(reader, report, live)
            report.num_corrupt = len(bad)
            result.corrupt += bad
    on_progress(len(listing.numbers), len(listing.numbers))
    return result


def _look(reader: SegmentReader, folder: Path, number: int) -> tuple[SegmentReport, Found | None]:
    path = folder / segment_name(number)
    report = SegmentReport(number, path, "damaged", 0)
    try:
        report.file_bytes = path.stat().st_size
        content = reader.inspect(str(path), number, writable=False)
    except FileNotFoundError:
        return SegmentReport(number, path, "gone", 0), None
    except NewerFormatError as error:
        report.state, report.problem = "newer", str(error)
        return report, None
    except OSError as error:
        report.problem = str(error)
        return report, None
    if isinstance(content, Foreign):
        report.state = "foreign"
        return report, None
    if isinstance(content, Damaged):
        report.state, report.problem = "open" if content.empty else "damaged", content.reason
        return report, None
    report.state = "sealed" if content.sealed else "open"
    report.tenant, report.num_torn = content.segment.tenant.hex(), content.num_torn
    return report, content


def _bad(reader: SegmentReader, report: SegmentReport, live: Entries) -> list[StoreKey]:
    """Keys of live records that are not what was stored; all, where reads fail so often that no more are tried."""
    try:
        whole = set(keys_of(reader.verified(str(report.path), live)))
    except OSError as error:
        if is_passing(error) or error.errno in NOT_ALLOWED_ERRNOS:
            raise
        report.problem, whole = str(error), set()
    return [key for key in keys_of(live) if key not in whole]


def _count(report: SegmentReport, content: Found, entries: Entries, there: npt.NDArray[np.bool_]) -> None:
    records = entries["kind"] == Kind.RECORD
    lengths = entries["header"]["stored_length"].astype(np.int64)
    report.num_live, report.num_tombstones = int(there.sum()), int((~records).sum())
    report.num_dead = int(records.sum()) - report.num_live
    report.live_bytes = int(lengths[there].sum())
    dead_pages = sum(pages_of(int(length)) for length in lengths[records & ~there])
    report.orphaned_bytes = (dead_pages + content.lost_pages) * PAGE
