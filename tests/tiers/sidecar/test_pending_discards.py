"""What is to be forgotten is forgotten, whatever the tier process is doing: the folder outlives it."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from aside_rig import BLOCK_BYTES, MIB, PATIENCE_S, Heard, start, until
from build_rig import build, result
from disk_rig import num_blocks
from hierarchy_rig import chain
from hierarchy_rig import until as until_value
from kvtier.build.engine_cache import EngineCache
from kvtier.errors import ClosedError, InvariantError
from kvtier.events import Event, EventKind
from kvtier.memory.arena import Arena
from kvtier.metrics import Metrics
from kvtier.testing.blocks import summed
from kvtier.testing.contract import make_key, make_payload
from kvtier.testing.leaks import Holdings, require_nothing_beyond
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.sidecar import ProcessSettings, SharedMemory, SidecarTier, TierProcess
from kvtier.tiers.sidecar.child import ChildProcess
from kvtier.tiers.sidecar.pending_discards import OpeningInventory, PendingDiscards
from suspending import suspend

KEYS = [make_key(i) for i in range(8)]
SIGNALS = pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])


def filled(folder: Path, arena: Arena, heard: Heard) -> tuple[TierProcess, SidecarTier, int]:
    settings = json.dumps([str(folder), 4 * MIB])
    process = start(arena, "disk", settings, on_event=heard, call_timeout_s=3.0)
    tier = SidecarTier("disk", process)
    for i in range(len(KEYS)):
        arena.view(i)[:] = make_payload(i, BLOCK_BYTES)
    items = [summed(key, arena.view(i)) for i, key in enumerate(KEYS)]
    assert tier.write(items) == [WriteStatus.STORED] * len(KEYS)
    pid = process.pid
    assert pid is not None
    return process, tier, pid


@SIGNALS
def test_a_discard_without_an_answer_is_made_good(signum: signal.Signals, tmp_path: Path) -> None:
    """The folder is away meanwhile, so that no other process answers."""
    arena, heard, folder = Arena(16, BLOCK_BYTES, shared=True), Heard(), tmp_path / "disk"
    process, tier, pid = filled(folder, arena, heard)
    suspend(pid)
    (folder.rename(tmp_path / "away"), folder.write_text("not a folder"))
    os.kill(pid, signum)
    assert tier.discard(KEYS[:3]) == 0
    (folder.unlink(), (tmp_path / "away").rename(folder))
    until(lambda: process.pid not in (None, pid), "another process serves")
    assert tier.lookup(KEYS) == [Status.MISS] * 3 + [Status.HIT] * 5
    assert heard.keys == set(KEYS[3:])
    after_death = heard.events[[event.kind for event in heard.events].index(EventKind.CLEARED) :]
    assert not any(set(KEYS[:3]) & set(event.keys) for event in after_death), "nobody was told of them again"
    process.close()
    arena.close()


def test_what_nobody_can_name_is_forgotten_by_its_prefix(tmp_path: Path) -> None:
    """The folder is away, so that there is no process for a while."""
    arena, heard, folder = Arena(16, BLOCK_BYTES, shared=True), Heard(), tmp_path / "disk"
    process, tier, pid = filled(folder, arena, heard)
    suspend(pid)
    (folder.rename(tmp_path / "away"), folder.write_text("not a folder"))
    os.kill(pid, signal.SIGKILL)
    until(lambda: EventKind.CLEARED in [event.kind for event in heard.events], "all was taken back")
    assert process.pid is None, "whoever hears that nothing is known finds no process"
    process.forget_untold("disk", bytes(KEYS[0]))
    with pytest.raises(InvariantError, match="nothing was verified"):
        tier.check()
    (folder.unlink(), (tmp_path / "away").rename(folder))
    until(lambda: process.pid is not None, "another process serves")
    assert tier.lookup(KEYS) == [Status.MISS] + [Status.HIT] * 7
    assert heard.keys == set(KEYS[1:])
    tier.check()
    process.forget_untold("disk", bytes(KEYS[1]))
    assert tier.lookup(KEYS[1:]) == [Status.HIT] * 7, "with a process, discards name what they mean"
    process.close()
    with pytest.raises(ClosedError):
        process.discard("disk", KEYS)
    arena.close()


def test_a_hung_process_does_not_get_the_time_of_a_busy_one(tmp_path: Path) -> None:
    arena = Arena(16, BLOCK_BYTES, shared=True)
    settings = ProcessSettings(factory="aside_rig:memory", settings=str(MIB), close_timeout_s=3600.0)
    process = TierProcess(SharedMemory(arena.descriptor, arena.memory), settings, metrics=Metrics())
    pid = process.pid
    assert pid is not None
    suspend(pid)
    with ThreadPoolExecutor(1) as thread:
        try:
            thread.submit(process.close).result(PATIENCE_S)
        finally:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)
    assert not psutil.pid_exists(pid)
    arena.close()


def test_debts_add_up() -> None:
    owed, more = PendingDiscards(), PendingDiscards()
    assert not owed
    more.add("disk", KEYS[:1])
    more.add_prefix("disk", KEYS[2])
    more.add_prefix("other", b"")
    owed.merge(more)
    assert owed.of({"disk": KEYS}) == {"disk": sorted([KEYS[0], KEYS[2]]), "other": []}


def test_an_inventory_is_told_as_it_is_in_the_end() -> None:
    heard = Heard()
    inventory = OpeningInventory(heard)
    for event in (
        Event(EventKind.STORED, "disk", tuple(KEYS[:1])),
        Event(EventKind.CLEARED, "disk"),
        Event(EventKind.STORED, "disk", tuple(KEYS[1:4])),
        Event(EventKind.REMOVED, "disk", tuple(KEYS[2:3])),
    ):
        inventory.on_event(event)
    assert not heard.events
    (inventory.tell(), inventory.tell())
    assert heard.events == [Event(EventKind.STORED, "disk", (KEYS[1], KEYS[3]))]
    inventory.on_event(Event(EventKind.REMOVED, "disk", (KEYS[1],)))
    assert list(inventory.keys["disk"]) == [KEYS[3]]
    inventory.end()
    inventory.on_event(Event(EventKind.REMOVED, "disk", (KEYS[3],)))
    assert not heard.keys
    assert not inventory.keys


def _tier_process() -> psutil.Process:
    def serving() -> psutil.Process | None:
        return next(iter(psutil.Process().children()), None)

    return until_value(serving)


@pytest.mark.parametrize("state", ["hangs", "has just died", "is gone and does not come back soon"])
def test_a_reset_reaches_the_folder(state: str, tmp_path: Path) -> None:
    folder, away = tmp_path / "blocks", tmp_path / "away"
    device = np.random.default_rng(3).integers(0, 256, (32, BLOCK_BYTES), dtype=np.uint8)
    hashes = chain(8)
    sections = {
        "cache": {"load_deadline_s": 3.0},
        "pool": {"call_timeout_s": 0.5},
        "disk": {"directory": "blocks", "capacity_bytes": "16MiB"},
    }
    with build(tmp_path, device, **sections) as cache:
        assert not result(cache.hierarchy, cache.hierarchy.start_save([(h, i) for i, h in enumerate(hashes)])).failed
        until(lambda: num_blocks(folder) == len(hashes), "all are on disk")
        pid = _tier_process().pid
        suspend(pid)
        if state != "hangs":
            if state != "has just died":
                (folder.rename(away), folder.write_text("not a folder"))
            os.kill(pid, signal.SIGKILL)
            until(lambda: state == "has just died" or not psutil.pid_exists(pid), "the death was noticed")
        cache.hierarchy.reset()
        if away.exists():
            (folder.unlink(), away.rename(folder))
        until(lambda: num_blocks(folder) == 0, "the folder forgets")
        assert _found(cache, hashes) == 0
    with build(tmp_path, device, **sections) as cache:
        assert _found(cache, hashes) == 0, "the next engine finds nothing"


def _found(cache: EngineCache, hashes: list[bytes]) -> int:
    ticket = cache.hierarchy.start_lookup(hashes)  # type: ignore[arg-type]
    return sum(s.status is Status.HIT for s in until_value(lambda: cache.hierarchy.poll_lookup(ticket)))


def test_secrets_in_the_environment_stay_out_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SECRET", "TOKEN"):  # what the configuration names
        monkeypatch.setenv(name, "of nobody's business")
    monkeypatch.setenv("OTHER", "inherited")
    device = np.zeros((32, BLOCK_BYTES), dtype=np.uint8)
    with build(tmp_path, device, disk={"directory": "blocks", "capacity_bytes": "16MiB"}):
        environ = _tier_process().environ()
    assert environ["OTHER"] == "inherited"
    assert not {"SECRET", "TOKEN"} & environ.keys()


def test_a_process_that_dies_while_it_is_closed_keeps_no_memory_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Records of the log live as long as a test, or as whoever collects them likes."""
    close = ChildProcess.close

    def kill_and_close(child: ChildProcess, timeout_s: float) -> None:
        os.kill(child.pid, signal.SIGKILL)
        close(child, timeout_s)

    monkeypatch.setattr(ChildProcess, "close", kill_and_close)
    device = np.zeros((32, BLOCK_BYTES), dtype=np.uint8)
    before = Holdings.now()
    with build(tmp_path, device, disk={"directory": "blocks", "capacity_bytes": "16MiB"}):
        pass
    assert "what was not written yet is forgotten" in caplog.text
    require_nothing_beyond(before)
