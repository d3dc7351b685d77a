"""The start: what segments hold, whose newest copies count, what discards have forgotten, and a footer for each."""

import logging
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError
from kvtier.events import EventKind
from kvtier.identity.keys import StoreKey, TenantId
from kvtier.metrics import Metrics
from kvtier.tiers.common.event_queue import EventQueue
from kvtier.tiers.disk.log.format import Entries, Kind, NewerFormatError, keys_of
from kvtier.tiers.disk.log.scan import Damaged, Foreign, Found
from kvtier.tiers.disk.log.segments import NO_EPOCH, Segment
from kvtier.tiers.disk.medium.folder import DiskFolder
from kvtier.tiers.disk.medium.health import NOT_ALLOWED_ERRNOS, is_passing
from kvtier.tiers.disk.reclaim.space import SpaceManager
from kvtier.tiers.disk.state.index import RECORD, Records
from kvtier.tiers.disk.state.log_state import LogState, records_of, tagged
from kvtier.tiers.disk.state.segment_files import SegmentFiles
from kvtier.tiers.disk.state.tag_table import Tags

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Recovery:
    """What a start found. Filled by `recover`."""

    num_foreign: int = 0
    """Files that kvtier did not make."""
    num_damaged: int = 0
    """Segments of which nothing could be read; they are gone now."""
    num_torn: int = 0
    """Records that were being written when the process ended."""
    unfinished: list[Segment] = field(default_factory=list)
    """Segments that are to be sealed now."""
    live: list[tuple[Entries, npt.NDArray[np.bool_]]] = field(default_factory=list)
    """Entries of each segment, and which of them are found from now on."""

    def events(self) -> Iterator[list[StoreKey]]:
        """Keys that are there, segment by segment."""
        for entries, there in self.live:
            if there.any():
                yield keys_of(entries[there])


def recover(folder: DiskFolder, files: SegmentFiles, state: LogState, executor: Executor) -> Recovery:
    """Fills the books, which nobody uses yet, from the folder.

    Raises `ConfigError` for a segment of a newer version, before anything is changed, and `OSError`.
    """
    found = Recovery()
    listing = folder.list()
    found.num_foreign = len(listing.foreign)
    looks = executor.map(lambda number: _look(folder, files, number), listing.numbers)
    contents = list(zip(listing.numbers, looks, strict=True))
    gathered: list[Gathered] = []
    for number, content in contents:
        if isinstance(content, Foreign):
            found.num_foreign += 1
            continue
        state.segments.not_before(number)
        if isinstance(content, Damaged):
            found.num_damaged += not content.empty
            _log.log(
                logging.INFO if content.empty else logging.WARNING,
                "disk tier segment %s is dropped: %s", folder.segment_path(number), content.reason,
            )  # fmt: skip
            files.drop(number)
        elif not len(content.entries):
            found.num_torn += content.num_torn
            files.drop(number)
        else:
            found.num_torn += content.num_torn
            gathered.append(adopt(content, state))
    found.live = decide(gathered, state)
    found.unfinished = [s for s in (state.to_seal(g.segment) for g in gathered) if s is not None]
    return found


def take_over(
    found: Recovery, name: str, space: SpaceManager, events: EventQueue, metrics: Metrics, *, tell: bool
) -> None:
    """Counts what was found, tells of it, seals what was open, and evicts the oldest down to the capacity."""
    metrics.foreign_files.labels(name).inc(found.num_foreign)
    metrics.corrupt_blocks.labels(name).inc(found.num_damaged)
    metrics.torn_blocks.labels(name).inc(found.num_torn)
    for keys in found.events() if tell else ():
        events.post(EventKind.STORED, keys)
    for segment in found.unfinished:
        space.finish(segment)
    space.fit()
    space.drop_all_dead()
    events.flush()


@dataclass(slots=True)
class Gathered:
    """A segment's entries and their tags."""

    segment: Segment
    entries: Entries
    tags: Tags


def _look(folder: DiskFolder, files: SegmentFiles, number: int) -> Found | Damaged | Foreign:
    path = folder.segment_path(number)
    try:
        return files.reader.inspect(path, number)
    except NewerFormatError as error:
        raise ConfigError(
            f"disk tier folder {folder.path}: {path} is of another format ({error}): use the release that wrote it, "
            "empty the folder, or name another"
        ) from error
    except OSError as error:
        if is_passing(error) or error.errno in NOT_ALLOWED_ERRNOS:
            raise
        return Damaged(f"it cannot be read: {error}", empty=False)


def adopt(content: Found, state: LogState) -> Gathered:
    """Enters a segment into the books, none of its records as yet."""
    segment = Segment(content.segment, max(content.file_pages, content.end_page))
    segment.next_page, segment.num_entries = content.end_page, len(content.entries)
    segment.retired, segment.sealed = True, content.sealed
    segment.landed = [] if content.sealed else [content.entries]
    records = content.entries["kind"] == Kind.RECORD
    epochs = content.entries["epoch"]
    segment.min_epoch = int(epochs[records].min(initial=NO_EPOCH))
    segment.last_forget = int(epochs[~records].max(initial=0))
    state.segments.add(segment, from_aside=False)
    state.epoch = max(state.epoch, int(epochs.max()))
    return Gathered(segment, content.entries, tagged(state, content.entries)[1])


def decide(gathered: list[Gathered], state: LogState) -> list[tuple[Entries, npt.NDArray[np.bool_]]]:
    """Enters the records that count, and says which of each segment's entries these are.

    The latest of all that was ever said of a key counts; nothing that a purge has overtaken does.
    """
    if not gathered:
        return []
    state.purges_written = purged = _purges(gathered)
    tags = np.concatenate([g.tags for g in gathered])
    epochs = np.concatenate([g.entries["epoch"] for g in gathered])
    kinds = np.concatenate([g.entries["kind"] for g in gathered])
    limits = np.concatenate([np.full(len(g.entries), purged.get(g.segment.id.tenant, 0), "<u8") for g in gathered])
    order = np.lexsort((epochs, tags[:, 1], tags[:, 0]))
    ordered = tags[order]
    last = np.append((ordered[1:] != ordered[:-1]).any(axis=1), True)
    there = np.zeros(len(tags), bool)
    there[order[last]] = True
    there &= (kinds == Kind.RECORD) & (epochs >= limits)
    copies = np.zeros(len(tags), bool)
    copies[order] = there[order[last]][np.cumsum(last) - last]  # whether the latest entry of its key is a live record
    copies &= (kinds == Kind.RECORD) & ~there
    start = 0
    which: list[tuple[Entries, npt.NDArray[np.bool_]]] = []
    live: list[Records] = []
    for g in gathered:
        mine = there[start : start + len(g.entries)]
        if copies[start : start + len(g.entries)].any():  # it may outlive the segment of the newest one
            state.segments.owe(g.segment)
        start += len(g.entries)
        state.segments.count(g.segment, int(mine.sum()))
        live.append(records_of(g.entries[mine], g.tags[mine], g.segment.number))
        which.append((g.entries, mine))
    state.index.insert(np.concatenate([np.empty(0, RECORD), *live]))
    return which


def _purges(gathered: list[Gathered]) -> dict[TenantId, int]:
    """The epoch of the latest purge of each tenant that has one."""
    purged: dict[TenantId, int] = {}
    for g in gathered:
        epochs = g.entries["epoch"][g.entries["kind"] == Kind.PURGE]
        if len(epochs):
            purged[g.segment.id.tenant] = max(purged.get(g.segment.id.tenant, 0), int(epochs.max()))
    return purged
