"""Prometheus's own tools: Debian's package `prometheus` has them."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ASKED_FOR = "KVTIER_TEST_PROMETHEUS"


def found(program: str) -> str:
    """The path of `promtool` or `prometheus`; skips the test where there is none, unless it is asked for."""
    path = shutil.which(program)
    if path is None:
        if os.environ.get(ASKED_FOR) == "1":
            pytest.fail(f"{ASKED_FOR} is set, and there is no {program}")
        pytest.skip(f"no {program}: install Debian's package prometheus")
    return path


def promtool(*arguments: str | Path, stdin: str | None = None) -> None:
    """Runs it; what it finds fails the test."""
    answer = subprocess.run(
        [found("promtool"), *map(str, arguments)], input=stdin, capture_output=True, text=True, timeout=120
    )
    assert answer.returncode == 0, f"{answer.stdout}\n{answer.stderr}"
    if stdin is not None:
        assert not answer.stderr, f"names or units are not Prometheus's: {answer.stderr}"


def check_page(page: str) -> None:
    """Holds a page of metrics against Prometheus's conventions of names and units."""
    ours = [
        line
        for line in page.splitlines()
        if not line.removeprefix("# HELP ").removeprefix("# TYPE ").startswith("process_")
    ]
    promtool("check", "metrics", stdin="\n".join([*ours, ""]))
