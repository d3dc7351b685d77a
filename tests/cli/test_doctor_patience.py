"""`kvtier doctor` waits for what is slow, and not for what hangs."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtier_engine.checks
from certificates import Authority
from doctor_rig import diagnosed, engine_file, pool_file
from hanging_disk import hanging_disk
from kvtier.cli.doctor import command
from kvtier.cli.doctor.lines import Level, Line, Look
from kvtier.cli.doctor.patience import Patience
from kvtier.cli.doctor.running import run_looks

GOOD = Line(Level.OK, "good", "is well")


def test_nothing_that_hangs_is_waited_for() -> None:
    over = threading.Event()

    def hang() -> Iterator[Line]:
        yield GOOD
        over.wait(60)

    def fail() -> list[Line]:
        raise ZeroDivisionError("by accident")

    looks = [Look("hung", hang), Look("good", lambda: [GOOD]), Look("wrong", fail)]
    (hung, good, wrong), have_ended = run_looks(looks, Patience(0.2, 60))
    over.set()
    assert not have_ended
    assert good == [GOOD]
    assert hung[0] == GOOD, "what it has found before it hangs"
    assert (hung[1].level, hung[1].subject, "hangs" in hung[1].remedy) == (Level.PROBLEM, "hung", True)
    assert (wrong[0].level, "ZeroDivisionError: by accident" in wrong[0].found) == (Level.WARNING, True)
    join_looks()


def join_looks() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("kvtier-doctor"):
            thread.join()


def compute(seconds: float) -> list[Line]:
    begun = time.thread_time()
    while time.thread_time() < begun + seconds:
        pass
    return [GOOD]


def test_what_waits_for_cores_does_not_hang() -> None:
    """Four processes that compute for each core, and a look that needs three times what it may be blocked for."""
    loop = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(loop) for _ in range(4 * len(os.sched_getaffinity(0)))]
    look = Look("slow", lambda: compute(0.6))
    try:
        assert run_looks([look], Patience(0.2, 60)) == ([[GOOD]], True)
        (((line,),), has_ended) = run_looks([look], Patience(0.2, 0.1))
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert (has_ended, line.level, "threads want" in line.found) == (False, Level.PROBLEM, True)
    assert "when the host has less to do" in line.remedy
    assert "hangs" not in line.remedy
    join_looks()


def test_one_check_that_hangs_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(command, "_LOOKS_S", 0.5)
    monkeypatch.setattr(kvtier_engine.checks, "load_model_shape", lambda model: over.wait(60))
    monkeypatch.setattr(os, "_exit", lambda code: None)
    (tmp_path / "model").mkdir()
    more = "[engine]\nmodel = 'model'\n[disk]\ndirectory = 'disk'\nreserve_bytes = '900TiB'"
    file = engine_file(tmp_path, "127.0.0.1:1", more)
    try:
        found = diagnosed(file)
    finally:
        over.set()
        join_looks()
    found.tells("disk.reserve_bytes", "nothing will be stored")
    found.tells("configuration", "has not answered")


def test_a_disk_that_hangs_hides_no_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That holds for an engine's file and for a pool's."""
    monkeypatch.setattr(command, "_LOOKS_S", 1.0)
    monkeypatch.setattr(os, "_exit", lambda code: None)
    Authority(tmp_path).issue("own", "127.0.0.1", valid_days=-1)
    tls, folder = "tls_certificate = 'own.pem'\ntls_key = 'own.key'\n", tmp_path / "mounted" / "disk"
    files = {
        "engine": engine_file(tmp_path, "127.0.0.1:1", f"[engine]\n{tls}[disk]\ndirectory = '{folder}'"),
        "pool_service": pool_file(tmp_path, f"{tls}disk_dir = '{folder}'"),
    }
    with hanging_disk(tmp_path) as disk:
        for table, file in files.items():
            disk.hang()
            try:
                found = diagnosed(file)
            finally:
                disk.answer()
                join_looks()
            found.tells(f"{table}.tls_certificate", "expired at")
            found.tells("disk", "has not answered", "look for a disk, a file system of a network")
