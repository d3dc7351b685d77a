"""Segments of a disk tier that are lost: removed by somebody, or in a bad region of the drive."""

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from disk_forgetting_rig import SMALL, found, items
from disk_log_rig import KIB, MIB, BadPages, counted
from disk_rig import opened, segments
from kvtier.events import Event, EventKind, TierState
from kvtier.identity.keys import StoreKey
from kvtier.metrics import Metrics
from kvtier.testing.blocks import TENANT, make_key, make_payload, read_blocks
from kvtier.tiers.base import WriteStatus
from kvtier.tiers.disk.medium.files import OsFiles


class TestLostSegments:
    def test_one_that_somebody_removed_is_missed_alone(self, tmp_path: Path) -> None:
        with opened(tmp_path / "disk", segment_bytes=MIB) as tier:
            for i in range(4):
                tier.write(items([(i, j) for j in range(40)]))
                tier._parts.log.retire_all()
            tier._parts.files.descriptors.forget(1)
            segments(tmp_path / "disk")[0].unlink()
            labels = [(i, j) for i in range(4) for j in range(40)]
            blocks = read_blocks(tier, [make_key(label) for label in labels], SMALL)
            assert [block is not None for block in blocks] == [i > 0 for i, _ in labels]
            assert tier.write(items(["new"])) == [WriteStatus.STORED]

    @pytest.mark.parametrize("direct", [False, True])
    def test_what_is_written_to_a_file_without_a_name_is_refused(self, tmp_path: Path, direct: bool) -> None:
        """It would be gone when the process ends, and an acknowledged block is one that is not."""
        with opened(tmp_path / "disk", segment_bytes=MIB, files=OsFiles(direct=direct)) as tier:
            assert tier.write(items(["before"])) == [WriteStatus.STORED]
            segments(tmp_path / "disk")[0].unlink()
            assert tier.write(items(["lost"])) == [WriteStatus.FAILED]
            assert tier.write(items(["after"])) == [WriteStatus.STORED], "in a segment of its own"
        with opened(tmp_path / "disk") as tier:
            assert [found(tier, [label]) for label in ("before", "lost", "after")] == [0, 0, 1]

    @pytest.mark.parametrize("then", ["gone", "empty", "another tier's"])
    def test_a_folder_that_was_removed_switches_the_tier_off_and_stays_as_it_is(
        self, tmp_path: Path, then: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Two tiers in one folder would take more than either may, and none would find what was stored by the other."""
        folder = tmp_path / "disk"
        with contextlib.ExitStack() as stack:
            tier = stack.enter_context(opened(folder, segment_bytes=MIB))
            tier.write(items(range(100)))
            shutil.rmtree(folder)
            if then == "empty":
                folder.mkdir()
            elif then == "another tier's":
                stack.enter_context(opened(folder, segment_bytes=MIB)).write(items(["theirs"]))
            statuses = [status for i in range(200, 203) for status in tier.write(items([i]))]
            assert set(statuses) == {WriteStatus.FAILED}
            assert tier.state is TierState.OFF
            assert "the folder was removed, emptied or replaced while in use" in (tier.problem() or "")
            assert found(tier, range(100)) == 0
            assert caplog.text.count("give it a folder, then restart") == 1
        with opened(folder) as tier:
            assert found(tier, ["theirs"]) == (then == "another tier's")
            assert tier.write(items(["mine"])) == [WriteStatus.STORED], "the next start takes the folder"

    def test_a_bad_region_does_not_switch_the_tier_off(self, tmp_path: Path) -> None:
        class Bad(OsFiles):
            end = 0

            def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
                if offset < self.end:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return super().read(fd, buffers, offset)

        files = Bad(direct=False)
        with opened(tmp_path / "disk", files=files, segment_bytes=MIB, capacity_bytes=32 * MIB) as tier:
            tier.write(items(range(100)))
            files.end = MIB // 2
            tier.write(items([("fill", i) for i in range(40)]))
            tier.write(items(["other"]))
            assert read_blocks(tier, [make_key(i) for i in range(100)], SMALL) == [None] * 100
            assert read_blocks(tier, [make_key("other")], SMALL) == [make_payload("other", SMALL)]

    @pytest.mark.parametrize("forget", ["evict", "purge"])
    def test_whose_keys_nobody_can_read_are_told_of_when_they_are_asked_for(self, tmp_path: Path, forget: str) -> None:
        """A listener that follows events asks for such a block once, and learns then that it is gone."""
        known: set[StoreKey] = set()

        def note(event: Event) -> None:
            known.update(event.keys) if event.kind is EventKind.STORED else known.difference_update(event.keys)

        with opened(tmp_path / "disk", MIB, segment_bytes=64 * KIB, on_event=note) as tier:
            tier.write(items(range(8)))
            tier._parts.log.retire_all()
            tier._parts.files.descriptors.forget(1)  # as if others had been used since
            segments(tmp_path / "disk")[0].unlink()
            if forget == "purge":
                tier.purge(TENANT)
            for i in range(100):
                tier.write(items([("fill", i)], 20_000))
            lost = {make_key(i) for i in range(8)}
            assert found(tier, range(8)) == 0
            assert known >= lost, "nobody could say which they were"
            assert read_blocks(tier, [make_key(i) for i in range(8)], SMALL) == [None] * 8
            assert not known & lost
            assert found(tier, [("fill", i) for i in range(100)]) == len(known)

    def test_that_goes_while_a_purge_is_about_to_tell_of_it(self, tmp_path: Path) -> None:
        known: set[StoreKey] = set()

        def note(event: Event) -> None:
            known.update(event.keys) if event.kind is EventKind.STORED else known.difference_update(event.keys)

        with opened(tmp_path / "disk", on_event=note) as tier:
            tier.write(items(range(8)))
            tier._parts.log.retire_all()
            tell_of = tier._parts.space.tell_of

            def late(*arguments: Any) -> None:
                tier._parts.space.drop_dead(TENANT)  # as somebody else might who makes room
                tell_of(*arguments)

            tier._parts.space.tell_of = late  # type: ignore[method-assign]
            assert tier.purge(TENANT) == 8
            assert read_blocks(tier, [make_key(i) for i in range(8)], SMALL) == [None] * 8
            assert not known

    def test_one_that_cannot_be_read_is_named_and_counted_at_start(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Neither header nor footer, tried twice: it goes, and nothing else with it, what was forgotten included."""
        folder = tmp_path / "disk"
        for i in range(4):
            with opened(folder) as tier:
                tier.write(items([(i, "kept"), (i, "forgotten")]))
        with opened(folder) as tier:
            tier.discard([make_key((i, "forgotten")) for i in range(4)])
        before = segments(folder)
        metrics = Metrics()
        with opened(folder, files=BadPages(before[1], lambda offset: True), metrics=metrics) as tier:
            assert [found(tier, [(i, "kept")]) for i in range(4)] == [1, 0, 1, 1]
            assert found(tier, [(i, "forgotten") for i in range(4)]) == 0
        assert segments(folder) == [before[0], *before[2:]]
        assert counted(metrics, "kvtier_corrupt_blocks_total") == 1
        (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        assert str(before[1]) in line
        assert "Input/output error" in line

    def test_one_that_can_be_neither_read_nor_removed_stops_no_start(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An inode that a file system finds broken: open, stat and unlink fail alike."""
        folder = tmp_path / "disk"
        for i in range(3):
            with opened(folder) as tier:
                tier.write(items([i]))
        bad = str(segments(folder)[1])
        for op in ("open", "stat", "unlink"):
            monkeypatch.setattr(os, op, failing_for(bad, getattr(os, op)))
        with opened(folder, files=OsFiles(direct=False)) as tier:
            assert [found(tier, [i]) for i in range(3)] == [1, 0, 1]
            assert tier.write(items(["new"])) == [WriteStatus.STORED]


def failing_for(bad: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def failing(path: Any, *arguments: Any, **options: Any) -> Any:
        if path == bad:
            raise OSError(errno.EUCLEAN, os.strerror(errno.EUCLEAN), bad)
        return call(path, *arguments, **options)

    return failing
