"""How long the disk tier's lock is held, however much there is."""

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from disk_forgetting_rig import discard, items, purge
from disk_log_rig import KIB, MIB
from disk_rig import opened, segments
from kvtier.testing.blocks import make_key
from kvtier.tiers.disk.operations import tombstones as forgetting
from kvtier.tiers.disk.state.tag_table import Rows


class CountingLock:
    """Counts the lines that a thread runs while it has the lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.most = self._count = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._count = 0
        sys.settrace(self._trace)
        sys._getframe(1).f_trace = self._trace

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        sys._getframe(1).f_trace = None
        self.most = max(self.most, self._count)
        self._lock.release()

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        self._count += event == "line"
        return self._trace


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many records each step of a purge has taken out, eight at the most."""
    monkeypatch.setattr(forgetting, "_ROWS_AT_ONCE", 8)
    taken: list[int] = []
    take_out = forgetting.LogState.take_out

    def counted(state: forgetting.LogState, rows: Rows) -> None:
        taken.append(len(rows))
        take_out(state, rows)

    monkeypatch.setattr(forgetting.LogState, "take_out", counted)
    return taken


def test_forgetting_holds_others_up_no_longer_with_many_segments(tmp_path: Path, slices: list[int]) -> None:
    """Lines of Python under the tier's lock, in the longest hold, and records taken out in one."""
    most: dict[tuple[int, str], int] = {}
    for num_segments in (100, 400):
        with opened(tmp_path / str(num_segments), 256 * MIB, segment_bytes=32 * KIB) as tier:
            tier._parts.state.seed = 1  # or the index would have to look further at times
            labels = range(2 * num_segments)
            for label in labels:
                tier.write(items([label], 10_000))
            assert len(segments(tmp_path / str(num_segments))) >= num_segments
            for name, forget in (("discard", discard), ("purge", purge)):
                tier._parts.state.lock = lock = CountingLock()  # type: ignore[assignment]
                slices.clear()
                forget(tier, [make_key(labels[0]), make_key(labels[-1])])
                most[num_segments, name] = lock.most
                assert 0 < max(slices) <= 8
    for name in ("discard", "purge"):
        assert most[400, name] <= most[100, name] + 100, f"{most}: 300 segments more"
