"""`kvtier bench sglang`: ours and SGLang's files, every byte compared."""

import json
import subprocess
import sys

import pytest

TIMEOUT_S = 200


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_both_are_measured_in_the_same_rounds(layout: str) -> None:
    command = [sys.executable, "-m", "kvtier.cli.main", "bench", "sglang", f"--layout={layout}", "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert answer.returncode == 0, answer.stderr
    report = json.loads(answer.stdout)
    rows = {(case["op"], case["name"]): case for case in report["cases"]}
    assert set(rows) == {(op, name) for op in ("write", "read") for name in ("memcpy", "HiCacheFile", "kvtier")}
    assert all(row["payload_bytes"] == 2 << 20 and row["rounds"] >= 9 for row in rows.values())
    assert all(rows[op, "kvtier"]["floor"] == "HiCacheFile" for op in ("write", "read"))
    assert [note.split(":")[0] for note in report["notes"][1:]] == ["write", "read"]
