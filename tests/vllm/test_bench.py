"""`kvtier bench vllm` on a tiny model: every row is made by real engines, and a hit from elsewhere is no row."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_lab import Lab

from kvtier.errors import KvtierError
from kvtier.protocol.block import Verb
from kvtier_bench.vllm.contenders import BLOCK, NATIVE_FS, OWN_HIT, POOL, Contender, Forgets, named

TIMEOUT_S = 280
NUM_BLOCKS = 5
HITS = "vllm:kvtier_loaded_blocks"
OFFERED = "vllm:external_prefix_cache_hits"
OURS = Contender(POOL, Forgets.MEMORY, f"{HITS}:pool", 1, Verb.ACQUIRE, {"kv_connector": "KvtierConnector"})
FROM_POOL = {f"{HITS}:pool": NUM_BLOCKS, OFFERED: NUM_BLOCKS * BLOCK}


def _bench(lab: Lab, folder: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "kvtier.cli.main", "bench", "vllm", f"--model={lab.model}", "--json"]
    command += ["--tokens=170", "--rounds=1", "--threads=1", f"--peers={folder}", *options]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert answer.returncode == 0, answer.stderr
    report: dict[str, Any] = json.loads(answer.stdout)
    return report


def test_rows_of_ours_and_of_vllms_own(lab: Lab, tmp_path: Path) -> None:
    only = (POOL, NATIVE_FS)
    report = _bench(lab, tmp_path, "--no-throughput", *(f"--only={name}" for name in only))
    rows = {case["name"]: case for case in report["cases"]}
    assert set(rows) == {OWN_HIT, *only}
    assert all(row["rounds"] == 1 and row["p50_us"] > 0 for row in rows.values())
    assert rows[POOL]["floor"] == OWN_HIT
    assert set(rows[POOL]["beside"]) == {NATIVE_FS}
    assert [note.split(" takes ")[0] for note in report["notes"][1:]] == [POOL, POOL]


@pytest.mark.parametrize(
    ("moved", "verbs"),
    [
        ({f"{HITS}:host": NUM_BLOCKS, OFFERED: NUM_BLOCKS * BLOCK}, set()),
        ({f"{HITS}:pool": NUM_BLOCKS - 1, OFFERED: NUM_BLOCKS * BLOCK}, {"acquire"}),
        ({**FROM_POOL, "vllm:kvtier_failed_blocks": 1}, {"acquire"}),
        ({**FROM_POOL, "vllm:prompt_tokens_cached_by_source:device": BLOCK}, {"acquire"}),
        (FROM_POOL, {"lookup", "read"}),
        ({}, set()),
    ],
    ids=["another tier", "too few", "some failed", "the device too", "another path", "none"],
)
def test_hits_from_elsewhere_are_no_figure(moved: dict[str, float], verbs: set[str]) -> None:
    before = {f"{HITS}:pool": 7.0, f"{HITS}:host": 3.0}
    after = before | {name: before.get(name, 0) + amount for name, amount in moved.items()}
    with pytest.raises(KvtierError, match="would mean nothing"):
        OURS.require_hits(NUM_BLOCKS, before, after, verbs)


def test_hits_from_where_they_should_be() -> None:
    OURS.require_hits(NUM_BLOCKS, {}, FROM_POOL, {"lookup", "acquire", "release"})


def test_where_nothing_can_hit_nothing_is_expected() -> None:
    without_hits = Contender("saving", Forgets.NOTHING, transfer=OURS.transfer)
    without_hits.require_hits(0, {OFFERED: 3.0}, {OFFERED: 3.0}, {"write"})
    with pytest.raises(KvtierError, match="would mean nothing"):
        without_hits.require_hits(0, {OFFERED: 3.0}, {OFFERED: 3.0 + BLOCK}, set())


def test_a_row_that_nobody_has() -> None:
    with pytest.raises(KvtierError, match="--only 'kvtier tape': known are 'kvtier pool, same host'"):
        named([OURS], ["kvtier tape"])


def test_without_vllm_it_says_how_to_get_it() -> None:
    program = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "vllm" else find(name, *more)
sys.argv = ["kvtier", "bench", "vllm"]
import kvtier.cli.main
kvtier.cli.main.main()
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 1
    assert answer.stderr.startswith("kvtier: vLLM is not installed where this kvtier is: make .venv/vllm prepares")


def test_the_command_line_loads_no_vllm() -> None:
    program = (
        "import sys, kvtier.cli.app; kvtier.cli.app.make_app(); sys.exit(bool({'vllm', 'torch'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
