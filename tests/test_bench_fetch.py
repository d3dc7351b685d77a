"""`kvtier bench fetch` moves real blocks through a real pool, and reports both ways."""

import json
from pathlib import Path

from kvtier.bench.fetch import bench_fetch


def test_both_ways_are_reported(tmp_path: Path) -> None:
    out = tmp_path / "fetch.json"
    bench_fetch(json=out, payload_bytes=65_536, batch=4, blocks=16, load_threads=2, rounds=1)
    found = json.loads(out.read_text())
    assert [(case["name"], case["op"]) for case in found["cases"]] == [
        (name, f"fetch, {state}") for name in ("process", "threads") for state in ("idle", "busy")
    ]
    assert all(case["gb_per_s"] > 0 for case in found["cases"])
    assert [note.split(":")[0] for note in found["notes"]] == ["process", "threads"]
