"""Benchmarks run and report; what they measure is not tested."""

import json
import subprocess
import sys
from typing import Any

import pytest


def run(*arguments: str) -> Any:
    command = [sys.executable, "-m", "kvtier.cli", "bench", *arguments, "--json", "-"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(answer.stdout)


@pytest.mark.parametrize(
    ("arguments", "cases"),
    [
        (["hash"], ["int32 buffer", "list", "cbor"]),
        (["block-pool"], ["allocate + free", "match", "match + acquire + free"]),
        (["codec", "--payload-bytes", "4096"], ["raw in", "raw out", "lz4 in", "lz4 out"]),
        (["paths", "--payload-bytes", "4096", "--batch", "4"], ["tcp", "unix", "grpc"] * 2),
    ],
)
def test_a_benchmark_reports_json(arguments: list[str], cases: list[str]) -> None:
    report = run(*arguments)
    assert report["hardware"]
    assert report["commit"]
    assert [case["name"] for case in report["cases"]] == cases
    assert all(case["p50_us"] > 0 for case in report["cases"])
