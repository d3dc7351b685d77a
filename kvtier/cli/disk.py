"""The commands `kvtier inspect` and `kvtier fsck`: what is in a disk tier's folder, and whether it is sound."""

import json as json_module
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvtier.errors import ConfigError, KvtierError
from kvtier.tiers.disk.medium.folder import DiskFolder, require_format
from kvtier.tiers.disk.operations.survey import SegmentReport, Survey, survey
from kvtier.tiers.disk.tier import DiskTier

Directory = Annotated[Path, typer.Argument(help="Folder of a disk tier.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_TOTALS = ("num_live", "live_bytes", "num_dead", "num_tombstones", "num_torn", "num_corrupt", "orphaned_bytes")


def inspect(directory: Directory, json: Json = False) -> None:
    """What is in a disk tier's folder: segments, tenants, blocks. Changes nothing; the folder may be in use."""
    require_format(directory)
    _print(directory, _surveyed(directory, verify=False), as_json=json)


def fsck(
    directory: Directory,
    repair: Annotated[
        bool, typer.Option("--repair", help="Cut torn tails, drop corrupt blocks and segments that cannot be read.")
    ] = False,
    json: Json = False,
) -> None:
    """Reads all of a disk tier's folder and verifies every block. Not while a process uses it.

    Without --repair nothing is changed. Foreign files and segments of other formats are never touched. Exit code 1
    when something is damaged, and was not repaired.
    """
    require_format(directory)
    DiskFolder.open(directory, make=False).close()  # raises when somebody uses it
    found = _surveyed(directory, verify=True)
    if repair and not any(segment.state == "newer" for segment in found.segments):
        _repair(directory, found)
        found = _surveyed(directory, verify=True)
    _print(directory, found, as_json=json)
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


def _print(directory: Path, found: Survey, *, as_json: bool) -> None:
    if as_json:
        print(json_module.dumps(_plain(directory, found), indent=2))
        return
    console = Console()
    table = Table("segment", "state", "tenant", "file", "blocks", "bytes", "dead", "tombstones", "torn", "corrupt")
    for segment in found.segments:
        table.add_row(*_row(segment))
    console.print(table)
    console.print(
        f"{found.total('num_live'):,} blocks of {found.total('live_bytes'):,} bytes in {len(found.segments):,} "
        f"segments of {found.total('file_bytes'):,}; {found.total('orphaned_bytes'):,} bytes are orphaned, "
        f"{found.total('num_torn'):,} records torn, {found.total('num_corrupt'):,} corrupt; "
        f"{len(found.foreign):,} foreign files"
    )
    for segment in found.segments:
        if segment.problem:
            console.print(f"{segment.path.name}: {segment.problem}")


def _row(segment: SegmentReport) -> list[str]:
    figures = (
        segment.file_bytes,
        segment.num_live,
        segment.live_bytes,
        segment.num_dead,
        segment.num_tombstones,
        segment.num_torn,
        segment.num_corrupt,
    )
    return [f"{segment.number:08x}", segment.state, segment.tenant[:8], *(f"{figure:,}" for figure in figures)]


def _plain(directory: Path, found: Survey) -> dict[str, Any]:
    segments = [{**asdict(segment), "path": str(segment.path)} for segment in found.segments]
    totals = {name: found.total(name) for name in ("file_bytes", *_TOTALS)}
    return {
        "directory": str(directory),
        "sound": found.is_sound,
        "totals": totals,
        "foreign": found.foreign,
        "segments": segments,
    }
