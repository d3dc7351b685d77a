"""The file of the audit log: one that is full, moved, gone or slow costs lines, which are counted, and no more."""

import io
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from audit_rig import lines
from configured_pool import OLD, configuration, digest, running
from kvtier.errors import ConfigError
from kvtier_pool.audit import AuditLog
from kvtier_pool.metrics import PoolMetrics
from kvtier_pool.service import PoolService
from pool_rig import WAIT_S, pool_config, until


def test_a_medium_that_hangs_holds_nobody_up_and_what_is_lost_is_said(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    log = AuditLog(tmp_path / "audit.jsonl", PoolMetrics(registry))
    log.start()
    writing, may_write = threading.Event(), threading.Event()
    write = log._handler.emit

    def hang(record: Any) -> None:
        writing.set()
        assert may_write.wait(WAIT_S)
        write(record)

    log._handler.emit = hang  # type: ignore[method-assign]
    log.note("first")
    assert writing.wait(WAIT_S)
    for number in range(1500):
        log.note("next", number=number)
    assert registry.get_sample_value("kvtier_pool_audit_lines_lost_total") == 1500 - 1024
    may_write.set()
    until(lambda: any(line["event"] == "audit_lines_lost" for line in lines(tmp_path / "audit.jsonl")))
    log.stop()
    (lost,) = [line["count"] for line in lines(tmp_path / "audit.jsonl") if line["event"] == "audit_lines_lost"]
    assert lost == 1500 - 1024


def test_the_file_is_bounded_and_private(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl", PoolMetrics(CollectorRegistry()), max_bytes=4096)
    log.start()
    for number in range(1000):
        log.note("event", number=number)
    log.stop()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2", "audit.jsonl.3"]
    for file in files:
        assert file.stat().st_size <= 4096
        assert file.stat().st_mode & 0o777 == 0o600
        assert lines(file)


@pytest.mark.parametrize("moved", [True, False])
def test_lines_go_to_the_file_that_has_the_name_whoever_moves_it(tmp_path: Path, moved: bool) -> None:
    path, old = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl-20261124"
    log = AuditLog(path, PoolMetrics(CollectorRegistry()))
    log.start()
    log.note("first")
    until(lambda: bool(path.read_text()))
    if moved:
        path.rename(old)
    else:
        path.unlink()
    log.note("second")
    log.stop()
    assert [line["event"] for line in lines(path)] == ["second"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert not moved or [line["event"] for line in lines(old)] == ["first"]


def test_a_signal_after_logrotate_has_moved_the_file_makes_a_new_one(tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    path = configuration(tmp_path / "pool.toml", f'"{digest(OLD)}"')
    path.write_text(path.read_text().replace("[tenants.red]", 'audit_log = "audit.jsonl"\n[tenants.red]', 1))
    with running(path) as pool:
        audit.rename(tmp_path / "audit.jsonl.old")
        pool.service.process.send_signal(signal.SIGHUP)
        until(lambda: audit.exists() and "reload" in [line["event"] for line in lines(audit)])


def test_a_file_whose_folder_is_gone_loses_lines_and_says_so(tmp_path: Path) -> None:
    registry, folder = CollectorRegistry(), tmp_path / "folder"
    folder.mkdir()
    log = AuditLog(folder / "audit.jsonl", PoolMetrics(registry))
    log.start()
    folder.rename(tmp_path / "gone")
    log.note("lost")
    until(lambda: registry.get_sample_value("kvtier_pool_audit_lines_lost_total") == 1)
    folder.mkdir()
    log.note("kept")
    log.stop()
    assert [line["event"] for line in lines(folder / "audit.jsonl")] == ["kept"]


def test_a_file_that_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pool_service\.audit_log: .* cannot be written"):
        PoolService(pool_config(audit_log=tmp_path / "nowhere" / "audit.jsonl")).start()
    os.mkfifo(tmp_path / "nobody-reads")
    with pytest.raises(ConfigError, match="nobody-reads cannot be written"):
        PoolService(pool_config(audit_log=tmp_path / "nobody-reads")).start()


def test_lines_that_a_full_medium_refuses_are_counted() -> None:
    registry = CollectorRegistry()
    log = AuditLog(Path("/dev/full"), PoolMetrics(registry))
    log.start()
    log.note("first")
    until(lambda: registry.get_sample_value("kvtier_pool_audit_lines_lost_total") == 1)
    log.stop()


def test_a_log_that_filled_its_disk_goes_on_in_the_next_file(tmp_path: Path) -> None:
    """What the full one refused is refused once more when the log lets go of it."""
    registry, path = CollectorRegistry(), tmp_path / "audit.jsonl"
    path.symlink_to("/dev/full")
    log = AuditLog(path, PoolMetrics(registry))
    log.start()
    log.note("lost")
    until(lambda: registry.get_sample_value("kvtier_pool_audit_lines_lost_total") == 1)
    path.unlink()
    log.note("kept")
    log.note("kept, too")
    log.stop()
    assert [line["event"] for line in lines(path)] == ["kept", "kept, too"]
    assert registry.get_sample_value("kvtier_pool_audit_lines_lost_total") == 1


def test_a_log_goes_on_after_a_rotation_that_failed(tmp_path: Path) -> None:
    """A disk that is full when the file is closed for its new name leaves it closed."""
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, PoolMetrics(CollectorRegistry()))
    log.start()
    log.note("first")
    until(lambda: bool(path.read_text()))
    log._handler.stream.close()  # type: ignore[attr-defined]
    log.note("second")
    log.stop()
    assert [line["event"] for line in lines(path)] == ["first", "second"]


@pytest.mark.parametrize("medium", ["a file", "standard error"])
def test_whatever_happens_to_a_line_the_next_one_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], medium: str
) -> None:
    registry, path = CollectorRegistry(), tmp_path / "audit.jsonl"
    log = AuditLog(path if medium == "a file" else None, PoolMetrics(registry))
    log.start()
    emit = log._handler.emit

    def fail_once(record: Any) -> None:
        log._handler.emit = emit  # type: ignore[method-assign]
        raise ValueError("of no kind that anybody expects")

    log._handler.emit = fail_once  # type: ignore[method-assign]
    log.note("lost")
    until(lambda: registry.get_sample_value("kvtier_pool_audit_lines_lost_total") == 1)
    log.note("kept")
    log.stop()
    written = path.read_text() if medium == "a file" else capsys.readouterr().err
    assert '"kept"' in written
    assert '"lost"' not in written


def test_a_standard_error_that_is_closed_loses_lines_and_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    registry, closed = CollectorRegistry(), io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    log = AuditLog(None, PoolMetrics(registry))
    log.start()
    for number in range(1, 3):
        log.note("lost")
        until(lambda number=number: registry.get_sample_value("kvtier_pool_audit_lines_lost_total") == number)  # type: ignore[misc]
    log.stop()
