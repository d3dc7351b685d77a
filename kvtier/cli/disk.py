"""The commands `kvtier inspect` and `kvtier fsck`: what is in a disk tier's folder, and whether it is sound."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from kvtier.cli.amounts import bytes_text
from kvtier.cli.columns import aligned
from kvtier.cli.options import print_json, telling_in_json
from kvtier.config import load_config
from kvtier.errors import ConfigError, KvtierError
from kvtier.identity.keys import tenant_id, tenant_of
from kvtier.tiers.disk.medium.files import OsFiles
from kvtier.tiers.disk.medium.folder import DiskFolder, require_format
from kvtier.tiers.disk.operations.survey import SegmentReport, Survey, survey
from kvtier.tiers.disk.tier import DiskTier

Directory = Annotated[Path, typer.Argument(help="Folder of a disk tier.")]
Names = Annotated[
    Path | None, typer.Option("--config", help="TOML file of the pool or engine: tenants are shown by their names.")
]
Segments = Annotated[bool, typer.Option("--segments", help="Print a line for each segment, too.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, with all segments; on failure too.")]

_TOTALS = ("num_live", "live_bytes", "num_dead", "num_tombstones", "num_torn", "num_corrupt", "orphaned_bytes")
_ID_DIGITS = 8
_WIDTH = 80
_NO_TENANT = "-"
"""What stands where nothing can be said of a segment's tenant."""
_LEAST_ROOM_BYTES, _TENANT_ROOM_BYTES, _BLOCK_ROOM_BYTES = 1 << 20, 32 << 10, 1 << 10
"""What the file system must have free for a repair that drops corrupt blocks, for each tenant that has some, and for
each of them. It is more than is written, since a tier that has hardly any room left removes whole segments."""


@telling_in_json
def inspect(directory: Directory, config: Names = None, segments: Segments = False, json: Json = False) -> None:
    """What is in a disk tier's folder: segments, tenants, blocks. Changes nothing; the folder may be in use.

    Example: kvtier inspect /var/lib/kvtier --config /etc/kvtier/kvtier.toml
    """
    name_of = _namer(config)
    require_format(directory)
    _print(directory, _surveyed(directory, verify=False), name_of, with_segments=segments, as_json=json)


@telling_in_json
def fsck(
    directory: Directory,
    repair: Annotated[
        bool, typer.Option("--repair", help="Cut torn tails, drop corrupt blocks and segments that cannot be read.")
    ] = False,
    config: Names = None,
    segments: Segments = False,
    json: Json = False,
) -> None:
    """Reads all of a disk tier's folder and verifies every block. Not while a process uses it.

    Without --repair nothing is changed. Foreign files and segments of other formats are never touched. Corrupt blocks
    are dropped where the file system has room to write that down, at least 1 MiB. Exit code 1 when something is
    damaged, and was not repaired.

    Example: kvtier fsck /var/lib/kvtier --repair
    """
    name_of = _namer(config)
    require_format(directory)
    DiskFolder.open(directory, make=False).close()  # raises when somebody uses it
    found, num_lost = _surveyed(directory, verify=True), None
    if repair and not any(segment.state == "newer" for segment in found.segments):
        _repair(directory, found)
        sound = set(found.live).difference(found.corrupt)
        found = _surveyed(directory, verify=True)
        num_lost = len(sound.difference(found.live))
    _print(directory, found, name_of, with_segments=segments, as_json=json, num_lost=num_lost)
    if not found.is_sound:
        raise typer.Exit(1)


def _surveyed(directory: Path, *, verify: bool) -> Survey:
    try:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("segments", total=None)
            return survey(
                directory,
                verify=verify,
                on_progress=lambda done, total: progress.update(task, completed=done, total=total),
            )
    except OSError as error:
        raise KvtierError(f"{directory} cannot be read: {error}") from error


def _repair(directory: Path, found: Survey) -> None:
    """A start does most of it; what is corrupt is dropped, so that no start finds it again. Raises `KvtierError` where
    there is no room to drop it, which would cost sound blocks."""
    num_tenants = len({tenant_of(key) for key in found.corrupt})
    needed = _LEAST_ROOM_BYTES + num_tenants * _TENANT_ROOM_BYTES + len(found.corrupt) * _BLOCK_ROOM_BYTES
    capacity = found.total("file_bytes") + max(needed, _free_bytes(directory))  # nothing is to be evicted
    tier = DiskTier.open(directory, capacity, reserve_bytes=0)
    try:
        free = _free_bytes(directory)  # what the start has dropped has made room
        if found.corrupt and free < needed:
            blocks = f"{len(found.corrupt):,} corrupt {'block is' if len(found.corrupt) == 1 else 'blocks are'}"
            raise KvtierError(
                f"{directory}: {blocks} not dropped, since that would cost sound ones: its file system has {free:,} "
                f"bytes free, and {needed:,} are needed; make room, and repair again"
            )
        tier.drop(found.corrupt)
    finally:
        tier.close()
    left = set(os.listdir(directory))
    for segment in found.segments:
        if segment.state == "damaged" and segment.path.name in left:
            raise ConfigError(f"{segment.path} cannot be read or removed: {segment.problem}")


def _free_bytes(directory: Path) -> int:
    try:
        return OsFiles(direct=False).free_bytes(str(directory))
    except OSError as error:
        raise KvtierError(f"{directory}: its file system does not say how much room it has: {error}") from error


def _namer(config: Path | None) -> Callable[[str], str]:
    """Returns what gives a tenant's name for its id: without a file, or where that has no such tenant, the id's
    beginning."""
    names = {} if config is None else {tenant_id(name).hex(): name for name in load_config(config).tenants}
    return lambda tenant: names.get(tenant, tenant[:_ID_DIGITS] or _NO_TENANT)


def _print(
    directory: Path,
    found: Survey,
    name_of: Callable[[str], str],
    *,
    with_segments: bool,
    as_json: bool,
    num_lost: int | None = None,
) -> None:
    """:param num_lost: sound blocks that a repair has cost; None: there was none."""
    if as_json:
        repaired = {} if num_lost is None else {"num_lost": num_lost}
        print_json(_plain(directory, found, name_of) | repaired)
        return
    print(f"{directory}: {'sound' if found.is_sound else 'damaged'}")
    print()
    print("\n".join(_by_tenant(found.segments, name_of)))
    print()
    print("\n".join(_by_state(found.segments)))
    print()
    if with_segments:
        print("\n".join(_each(found.segments, name_of)))
        print()
    words = (
        f"{found.total('num_live'):,} blocks of {found.total('live_bytes'):,} bytes in {len(found.segments):,} "
        f"segments of {found.total('file_bytes'):,}; {found.total('orphaned_bytes'):,} bytes are orphaned, "
        f"{found.total('num_torn'):,} records torn, {found.total('num_corrupt'):,} corrupt; "
        f"{len(found.foreign):,} foreign files"
    )
    print(fill(words, _WIDTH))
    if num_lost:
        print(f"{num_lost:,} sound blocks were lost by the repair")
    for segment in found.segments:
        if segment.problem:
            print(f"{segment.path.name}: {segment.problem}")


def _by_tenant(segments: Sequence[SegmentReport], name_of: Callable[[str], str]) -> list[str]:
    """The tenants, those with most first."""
    of: dict[str, list[SegmentReport]] = {}
    for segment in segments:
        of.setdefault(segment.tenant, []).append(segment)
    by_size = sorted(of.items(), key=lambda item: -sum(segment.file_bytes for segment in item[1]))
    rows = [
        (
            name_of(tenant),
            f"{len(theirs):,}",
            bytes_text(sum(segment.file_bytes for segment in theirs)),
            f"{sum(segment.num_live for segment in theirs):,}",
            bytes_text(sum(segment.live_bytes for segment in theirs)),
            f"{sum(segment.num_dead for segment in theirs):,}",
            f"{sum(segment.num_corrupt for segment in theirs):,}",
        )
        for tenant, theirs in by_size
    ]
    return aligned(("tenant", "segments", "files", "blocks", "payload", "dead", "corrupt"), rows)


def _by_state(segments: Sequence[SegmentReport]) -> list[str]:
    counts = Counter(segment.state for segment in segments)
    rows = [
        (state, f"{count:,}", bytes_text(sum(segment.file_bytes for segment in segments if segment.state == state)))
        for state, count in counts.most_common()
    ]
    return aligned(("state", "segments", "files"), rows)


def _each(segments: Sequence[SegmentReport], name_of: Callable[[str], str]) -> list[str]:
    titles = ("segment", "state", "tenant", "file", "blocks", "payload", "dead", "tombstones", "torn", "corrupt")
    rows = [
        (
            f"{segment.number:08x}",
            segment.state,
            name_of(segment.tenant),
            bytes_text(segment.file_bytes),
            f"{segment.num_live:,}",
            bytes_text(segment.live_bytes),
            *(f"{of:,}" for of in (segment.num_dead, segment.num_tombstones, segment.num_torn, segment.num_corrupt)),
        )
        for segment in segments
    ]
    return aligned(titles, rows, num_words=3)


def _plain(directory: Path, found: Survey, name_of: Callable[[str], str]) -> dict[str, Any]:
    segments = [
        {**asdict(segment), "path": str(segment.path), "tenant_name": name_of(segment.tenant)}
        for segment in found.segments
    ]
    totals = {name: found.total(name) for name in ("file_bytes", *_TOTALS)}
    return {
        "directory": str(directory),
        "sound": found.is_sound,
        "totals": totals,
        "foreign": found.foreign,
        "segments": segments,
    }
