"""`kvtier inspect` and `kvtier fsck`, and the survey that they print."""

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from disk_log_rig import BadPages, block
from disk_rig import contents, damage, flip, num_blocks, opened, place_of, segments
from kvtier.cli.disk import fsck, inspect
from kvtier.errors import ConfigError, KvtierError
from kvtier.identity.keys import tenant_id
from kvtier.testing.blocks import make_key, make_payload, read_blocks, summed
from kvtier.tiers.disk.log.format import PAGE, keys_of
from kvtier.tiers.disk.medium.files import OsFiles
from kvtier.tiers.disk.medium.folder import MARKER
from kvtier.tiers.disk.operations.survey import survey
from kvtier.tiers.disk.tier import DiskTier

MIB = 1 << 20
NBYTES = 5_000

app = typer.Typer()
app.command()(inspect)
app.command()(fsck)


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eight blocks in two segments, one of them discarded."""
    for labels in (range(4), range(4, 8)):
        tier = open_tier(tmp_path / "disk")
        tier.write([summed(make_key(i), make_payload(i, NBYTES)) for i in labels])
        tier.close()
    tier = open_tier(tmp_path / "disk")
    tier.discard([make_key(0)])
    tier.close()
    return tmp_path / "disk"


def open_tier(folder: Path) -> DiskTier:
    return DiskTier.open(folder, 4 * MIB, reserve_bytes=0)


def there(folder: Path, labels: Sequence[int]) -> list[bool]:
    tier = open_tier(folder)
    found = read_blocks(tier, [make_key(i) for i in labels], NBYTES)
    tier.close()
    return [block is not None for block in found]


def test_inspect_counts(folder: Path) -> None:
    report = json.loads(run("inspect", folder, "--json").stdout)
    assert report["sound"]
    assert report["totals"]["num_live"] == 7
    assert report["totals"]["num_dead"] == report["totals"]["num_tombstones"] == 1
    assert [segment["num_live"] for segment in report["segments"]] == [3, 4, 0]
    assert "7 blocks of 35,000 bytes in 3 segments" in " ".join(run("inspect", folder).stdout.split())


def test_what_is_printed_is_read_at_80_columns_and_in_a_pipe(tmp_path: Path) -> None:
    """Numbers are whole, tenants have their names, and a row per segment is for those who ask."""
    folder, config = tmp_path / "disk", tmp_path / "kvtier.toml"
    config.write_text('[tenants.red]\ntoken_sha256 = ["env:RED"]\n')
    for tenant, count in (("red", 3), ("blue", 1)):
        for number in range(count):
            tier = DiskTier.open(folder, 64 * MIB, reserve_bytes=0, segment_bytes=MIB)
            key = make_key((tenant, number), tenant=tenant_id(tenant))
            tier.write([summed(key, make_payload(number, 300_000))])
            tier.close()
    lines = run("inspect", folder, "--config", config).stdout.splitlines()
    assert all(len(line) <= 80 for line in lines[1:])
    cells = [line.split() for line in lines]
    assert ["tenant", "segments", "files", "blocks", "payload", "dead", "corrupt"] in cells
    (red,) = [row for row in cells if row[:1] == ["red"]]
    assert (red[1], red[4:7]) == ("3", ["3", "878.9", "KiB"])
    assert ["sealed", "4"] in [row[:2] for row in cells]
    assert tenant_id("blue").hex()[:8] in [row[0] for row in cells if row]
    assert "4 blocks of 1,200,000 bytes in 4 segments" in " ".join(" ".join(lines).split())
    each = run("inspect", folder, "--config", config, "--segments").stdout
    assert len(each.splitlines()) == len(lines) + 6
    assert "…" not in each
    segments = json.loads(run("inspect", folder, "--config", config, "--json").stdout)["segments"]
    assert [segment["tenant_name"] for segment in segments].count("red") == 3
    assert run("fsck", folder, "--config", config).exit_code == 0


def test_inspect_looks_at_a_folder_in_use(folder: Path) -> None:
    tier = open_tier(folder)
    tier.write([summed(make_key("new"), make_payload("new", NBYTES))])
    assert json.loads(run("inspect", folder, "--json").stdout)["totals"]["num_live"] == 8
    with pytest.raises(ConfigError, match="in use by another process"):
        run("fsck", folder)
    tier.close()


def test_fsck_of_a_sound_folder_changes_nothing(folder: Path) -> None:
    before = {path: path.read_bytes() for path in segments(folder)}
    for _ in range(2):
        assert run("fsck", folder).exit_code == 0
    assert {path: path.read_bytes() for path in segments(folder)} == before


def test_fsck_finds_and_repairs_what_is_damaged(folder: Path) -> None:
    damage(folder, make_key(2))
    flip(segments(folder)[1], 20)
    path = segments(folder)[1]
    flip(path, path.stat().st_size - 20)  # neither header nor trailer: nothing is known of it
    (folder / "notes.txt").write_text("mine")
    found = run("fsck", folder, "--json")
    assert found.exit_code == 1
    report = json.loads(found.stdout)
    assert [segment["state"] for segment in report["segments"]] == ["sealed", "damaged", "sealed"]
    assert (report["totals"]["num_corrupt"], report["foreign"]) == (1, ["notes.txt"])
    assert not report["sound"]
    repaired = run("fsck", folder, "--repair", "--json")
    assert repaired.exit_code == 0
    assert json.loads(repaired.stdout)["sound"]
    assert there(folder, range(8)) == [False, True, False, True] + [False] * 4
    assert (folder / "notes.txt").read_text() == "mine"


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_repair_without_room_is_refused_and_costs_no_sound_block(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(folder, make_key(2))
    with monkeypatch.context() as patch:
        patch.setattr(OsFiles, "create", full)
        patch.setattr(OsFiles, "free_bytes", lambda *_: 4096)
        with pytest.raises(KvtierError, match=r"1 corrupt block is not dropped.*4,096 bytes free.*; make room, and"):
            run("fsck", folder, "--repair")
        assert num_blocks(folder) == 7, "the bad one is still there"
    repaired = run("fsck", folder, "--repair", "--json")
    assert (repaired.exit_code, json.loads(repaired.stdout)["num_lost"]) == (0, 0)
    assert there(folder, range(8)) == [False, True, False, True] + [True] * 4


def test_a_repair_that_a_quota_keeps_from_writing_costs_no_sound_block(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(folder, make_key(2))
    monkeypatch.setattr(OsFiles, "create", full)
    repaired = run("fsck", folder, "--repair", "--json")
    report = json.loads(repaired.stdout)
    assert (repaired.exit_code, report["sound"], report["num_lost"]) == (1, False, 0)
    assert (report["totals"]["num_live"], report["totals"]["num_corrupt"]) == (7, 1)


def test_a_repair_tells_of_sound_blocks_that_it_has_cost(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damage(folder, make_key(2))
    monkeypatch.setattr(DiskTier, "drop", lambda tier, keys: tier.discard([*keys, make_key(5), make_key(6)]))
    with monkeypatch.context() as patch:
        patch.setattr(OsFiles, "free_bytes", lambda *_: 100 * MIB)
        assert "\n2 sound blocks were lost by the repair\n" in run("fsck", folder, "--repair").stdout
    assert "lost" not in run("fsck", folder, "--repair").stdout


def test_a_repair_on_a_small_file_system_tells_of_no_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    damage(folder, make_key(2))
    monkeypatch.setattr(OsFiles, "free_bytes", lambda *_: 100 * MIB)
    assert run("fsck", folder, "--repair").exit_code == 0
    assert "others have taken space" not in caplog.text


def test_what_is_no_folder_of_a_disk_tier_is_refused(tmp_path: Path) -> None:
    for command in ("inspect", "fsck"):
        with pytest.raises(ConfigError, match="is no disk tier folder"):
            run(command, tmp_path)
        assert list(tmp_path.iterdir()) == []


def test_a_drive_that_fails_is_no_wrong_folder(tmp_path: Path) -> None:
    """The first page of a process cannot be read, and its memory gives EIO there."""
    (tmp_path / MARKER).symlink_to("/proc/self/mem")
    for command in ("inspect", "fsck"):
        with pytest.raises(ConfigError, match=r"Input/output error.*the drive or its file system fails: see dmesg"):
            run(command, tmp_path)


def test_a_survey_changes_nothing_and_counts_everything(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    with opened(folder) as tier:
        tier.write([block(i) for i in range(4)])
        tier.discard([make_key(0)])
        before = {path: path.read_bytes() for path in segments(folder)}
        (segment,) = survey(folder).segments
        assert (segment.state, segment.num_live, segment.num_dead, segment.num_tombstones) == ("open", 3, 1, 1)
        assert segment.live_bytes == 3 * NBYTES
        assert segment.orphaned_bytes == 2 * PAGE
        assert {path: path.read_bytes() for path in segments(folder)} == before
    damaged = place_of(folder, make_key(2))
    flip(damaged[0], damaged[1])
    found = survey(folder, verify=True)
    assert found.corrupt == [make_key(2)]
    assert not found.is_sound
    assert survey(folder).is_sound, "nobody looked at payloads"
    assert num_blocks(folder) == 3
    assert set(found.live) == {make_key(i) for i in (1, 2, 3)}
    assert keys_of(contents(segments(folder)[0]).entries).count(make_key(0)) == 2, "record and tombstone"


def test_a_file_of_which_nothing_can_be_said_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An inode that the file system finds broken."""
    folder = tmp_path / "disk"
    for i in range(2):
        with opened(folder) as tier:
            tier.write([block(i)])
    bad, stat = segments(folder)[0], os.stat

    def failing(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if str(path) == str(bad):
            raise OSError(errno.EUCLEAN, os.strerror(errno.EUCLEAN), str(path))
        return stat(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", failing)
    found = survey(folder)
    assert [segment.state for segment in found.segments] == ["damaged", "sealed"]
    assert "cleaning" in found.segments[0].problem
    assert not found.is_sound
    assert found.live == [make_key(1)]


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE])
def test_a_bad_region_is_what_a_survey_finds_and_not_its_end(tmp_path: Path, code: int) -> None:
    """More blocks than are tried one by one. What has nothing to do with the drive says nothing of the blocks."""
    folder = tmp_path / "disk"
    for labels in (range(50), range(50, 53)):
        with opened(folder, 64 * MIB) as tier:
            tier.write([block(i) for i in labels])
    (path, *_), footer = segments(folder), segments(folder)[0].stat().st_size - 3 * PAGE
    bad = BadPages(path, lambda offset: PAGE < offset < footer, code=code)
    if code == errno.EMFILE:
        with pytest.raises(OSError, match="Too many open files"):
            survey(folder, verify=True, files=bad)
        return
    found = survey(folder, verify=True, files=bad)
    assert [segment.num_corrupt for segment in found.segments] == [50, 0]
    assert "Input/output error" in found.segments[0].problem
    assert set(found.corrupt) == {make_key(i) for i in range(50)}
    assert not found.is_sound
