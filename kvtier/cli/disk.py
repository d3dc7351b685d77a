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
from kvtier.identity.keys import tenant_id
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

    Without --repair nothing is changed. Foreign files and segments of other formats are never touched. Exit code 1
    when something is damaged, and was not repaired.

    Example: kvtier fsck /var/lib/kvtier --repair
    """
    name_of = _namer(config)
    require_format(directory)
    DiskFolder.open(directory, make=False).close()  # raises when somebody uses it
    found = _surveyed(directory, verify=True)
    if repair and not any(segment.state == "newer" for segment in found.segments):
        _repair(directory, found)
        found = _surveyed(directory, verify=True)
    _print(directory, found, name_of, with_segments=segments, as_json=json)
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
    """A start does most of it; what is corrupt is discarded, so that no start finds it again."""
    room = max(2 * found.total("file_bytes"), 1 << 30)  # nothing is to be evicted
    tier = DiskTier.open(directory, room, reserve_bytes=0)
    try:
        tier.discard(found.corrupt)
    finally:
        tier.close()
    left = set(os.listdir(directory))
    for segment in found.segments:
        if segment.state == "damaged" and segment.path.name in left:
            raise ConfigError(f"{segment.path} cannot be read or removed: {segment.problem}")


def _namer(config: Path | None) -> Callable[[str], str]:
    """Returns what gives a tenant's name for its id: without a file, or where that has no such tenant, the id's
    beginning."""
    names = {} if config is None else {tenant_id(name).hex(): name for name in load_config(config).tenants}
    return lambda tenant: names.get(tenant, tenant[:_ID_DIGITS] or _NO_TENANT)


def _print(
    directory: Path, found: Survey, name_of: Callable[[str], str], *, with_segments: bool, as_json: bool
) -> None:
    if as_json:
        print_json(_plain(directory, found, name_of))
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
