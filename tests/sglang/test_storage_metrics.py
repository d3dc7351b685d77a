"""What the backend counts, where SGLang shows it."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import not_reached
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from kvtier.metrics import Metrics
from kvtier_sglang.metrics import StorageStats

stats = StorageStats(Metrics(), collects=True)
stats.begin("kv")
stats.count("kv", "read", "hit", 3)
stats.note_waiting(7)
shown = CollectorRegistry()
MultiProcessCollector(shown)
print(generate_latest(shown).decode())
"""


def test_sglang_shows_our_counters_beside_its_own(tmp_path: Path) -> None:
    """Its processes count in files, and its server collects these, whatever registry they were made for."""
    search = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environ = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": search}
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], env=environ, capture_output=True, text=True, timeout=120
    )
    assert answer.returncode == 0, answer.stderr
    assert 'kvtier_sglang_pages_total{op="read",pool="kv",status="hit"} 3.0' in answer.stdout
    assert 'kvtier_sglang_pages_total{op="write",pool="kv",status="owed"} 0.0' in answer.stdout
    assert "kvtier_sglang_waiting_bytes 7.0" in answer.stdout
