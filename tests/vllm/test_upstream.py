"""vLLM's own connector tests with our connector: those that docs/vllm-upstream-tests.md says run, and no others."""

import ast
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent / "upstream"
PAGE = ROOT / "docs" / "vllm-upstream-tests.md"
RUNS = "runs"
TIMEOUT_S = 280.0

sys.path.insert(0, str(HERE))

from sdist import UNIT, VLLM_CACHE, copy_to, fetch, unit_tests  # noqa: E402


def _pages() -> tuple[dict[str, dict[str, str]], set[str]]:
    """What the page says: tests and what becomes of them, by file; and the files that are listed as a whole."""
    listed: dict[str, dict[str, str]] = {}
    whole: set[str] = set()
    file = ""
    for line in PAGE.read_text().splitlines():
        if heading := re.fullmatch(r"### (\S+)", line):
            file = heading[1]
            listed[file] = {}
        elif line.startswith("## "):
            file = ""
        elif row := re.fullmatch(r"\| `([^`]+)` \| (.+) \|", line):
            if file:
                listed[file][row[1]] = row[2]
            else:
                whole.add(row[1])
    return listed, whole


LISTED, WHOLE = _pages()
CHOSEN = [f"{UNIT / file}::{test}" for file, tests in LISTED.items() for test, word in tests.items() if word == RUNS]


@pytest.fixture(scope="module")
def sources() -> Path:
    """vLLM's tests. Not to be written to."""
    return fetch()


def _functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_the_page_lists_every_file_and_test(sources: Path) -> None:
    assert set(LISTED).isdisjoint(WHOLE)
    assert sorted([*LISTED, *WHOLE]) == unit_tests(sources)
    for file, tests in LISTED.items():
        assert {name.partition("[")[0] for name in tests} == _functions(sources / UNIT / file), file


def test_the_page_names_tests_of_ours_that_exist() -> None:
    ours = {name for path in HERE.glob("test_*.py") for name in _functions(path)}
    named = {
        name
        for tests in LISTED.values()
        for word in tests.values()
        for name in re.findall(r"`(test_\w+)`", word.partition("Ours:")[2])
    }
    assert named <= ours, named - ours


def test_what_the_page_says_runs_passes(sources: Path, tmp_path: Path) -> None:
    where = copy_to(sources, tmp_path / "vllm")
    (where / "pytest.ini").write_text("[pytest]\nmarkers = cpu_test: of vLLM\n")
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-p", "no:asyncio", "-p", "upstream_plugin", "-q", "-c", "pytest.ini"]
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(where), str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(VLLM_CACHE),
    }
    ended = subprocess.run(
        [*command, f"--junit-xml={report}", *CHOSEN],
        cwd=where, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-6000:]
    cases = ElementTree.parse(report).findall(".//testcase")
    assert {case.get("name", "") for case in cases if case.find("skipped") is not None} == set()
    passed = {case.get("name", "") for case in cases}
    for node in CHOSEN:
        test = node.rpartition("::")[2]
        assert any(name == test or name.startswith(f"{test}[") for name in passed), node
