"""`kvtier bench fetch` and `clean-ahead` move real blocks, and report what came of it."""

import json

import pytest

from kvtier_bench.cases.clean_ahead import bench_clean_ahead
from kvtier_bench.cases.fetch import bench_fetch


def test_all_ways_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    bench_fetch(json=True, payload_bytes=65_536, batch=4, blocks=16, load_threads=2, rounds=1)
    found = json.loads(capsys.readouterr().out)
    assert [(case["name"], case["op"]) for case in found["cases"]] == [
        (name, f"fetch, {state}") for name in ("direct", "process", "threads") for state in ("idle", "busy")
    ]
    assert all(case["gb_per_s"] > 0 for case in found["cases"])
    assert [note.split(":")[0] for note in found["notes"]] == ["direct", "process", "threads", "leased", "copies"]


def test_what_was_evicted_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    bench_clean_ahead(json=True, payload_bytes=65_536, blocks=32, depth=16, rates="0.001,0.1", seconds=0.3)
    slow, fast = (case["figures"] for case in json.loads(capsys.readouterr().out)["cases"])
    assert slow["evicted"] < fast["evicted"]
    assert 0 <= fast["clean_share"] <= 1
    assert slow["clean_share"] == 1
