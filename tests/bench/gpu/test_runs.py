"""`make gpu`: processes that fail or are killed, what is left of a run, and how it is shown."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from kvtier.clock import MONOTONIC, Clock
from kvtier_bench.gpu import __main__ as command
from kvtier_bench.gpu.measuring.rows import Bar, held_to
from kvtier_bench.gpu.measuring.setting import Setting
from kvtier_bench.gpu.run import child as child_module
from kvtier_bench.gpu.run import runner
from kvtier_bench.gpu.run.journal import Journal, Outcome, document, outcomes_of
from kvtier_bench.gpu.run.parts import GRACE_S, SECOND, TOTAL_S, Part
from kvtier_bench.gpu.run.render import load, markdown
from kvtier_bench.gpu.run.runner import Run, run_parts
from kvtier_bench.measuring.report import Case

ROOT = Path(__file__).resolve().parents[3]
FACTS = {"commit": "abc", "machine": {"device": "a GPU", "cuda": None}}

CHILD = """
import subprocess, sys, time
from pathlib import Path
part, journal = sys.argv[1], Path(sys.argv[2])
def row(text):
    with journal.open("a") as file:
        file.write(text)
line = Path(__file__).with_suffix(".row").read_text().replace("PART", part)
if part == "good":
    row(line + "\\n" + line + "\\n")
    print("copies take several times as long", file=sys.stderr)
elif part == "crash":
    row(line + "\\n")
    sys.exit("the device has fallen off the bus")
else:
    subprocess.Popen(["sleep", "600"])
    row(line + "\\n" + line[:30])
    time.sleep(600)
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    row = Journal(tmp_path / "child_of_a_test.row")
    row.row("PART", Case("a", "b"))
    row.path.write_text(row.path.read_text().strip())
    (tmp_path / "child_of_a_test.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return "child_of_a_test"


def run_of(tmp_path: Path, child: str, say: Callable[[str], None] = str, clock: Clock = MONOTONIC) -> Run:
    return Run(Journal(tmp_path / "gpu.jsonl"), FACTS, total_s=100, child=child, say=say, clock=clock)


def test_a_part_that_fails_takes_no_other_with_it(tmp_path: Path, child: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_bench.gpu.run.runner.GRACE_S", 1.0)
    parts = [Part("crash", 20), Part("hang", 2.0), Part("good", 20)]
    said: list[str] = []
    run = run_of(tmp_path, child, said.append)
    crash, hang, good = outcomes = list(run_parts(run, parts))
    assert (crash.problem, crash.said) == ("exit status 1", "the device has fallen off the bus")
    assert len(crash.cases) == 1, "what it had given before"
    assert hang.problem.startswith("killed after")
    assert len(hang.cases) == 1, "but not half a row"
    assert (len(good.cases), good.problem, good.failed) == (2, "", False)
    assert good.said == "copies take several times as long"
    assert said[-1].strip() == good.said, "a warning is no problem, but is not lost"
    assert crash.failed
    assert said[0] == "[1/3] crash: at most 20 s"
    assert run.journal.outcomes() == outcomes
    assert outcomes_of(json.loads(json.dumps(document(outcomes)))) == outcomes


def test_what_there_is_no_time_for_is_left_out(tmp_path: Path, child: str) -> None:
    now = iter([0.0, 95.0])
    run = run_of(tmp_path, child, clock=lambda: next(now))
    (outcome,) = run_parts(run, [Part("good", 20)])
    assert outcome.failed
    assert "time was over" in outcome.problem
    assert run.journal.outcomes() == [], "an earlier time counts"


def descendants(process: psutil.Process) -> list[psutil.Process]:
    return process.children(recursive=True)


def until(condition: Callable[[], object]) -> None:
    deadline = MONOTONIC() + 60
    while not condition():
        assert MONOTONIC() < deadline
        time.sleep(0.02)


def test_a_run_that_is_killed_leaves_its_rows_and_no_process(tmp_path: Path, child: str) -> None:
    """SIGKILL, while a part hangs that has started a process of its own."""
    journal = Journal(tmp_path / "gpu.jsonl")
    script = f"""
from pathlib import Path
from kvtier_bench.gpu.run.journal import Journal
from kvtier_bench.gpu.run.parts import Part
from kvtier_bench.gpu.run.runner import Run, run_parts
run = Run(Journal(Path({str(journal.path)!r})), {{}}, total_s=900, child={child!r})
list(run_parts(run, [Part("good", 60), Part("hang", 600)]))
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL) as harness:
        try:
            process = psutil.Process(harness.pid)
            until(lambda: any(of.part == "hang" and of.cases for of in journal.outcomes()))
            started = descendants(process)
            assert len(started) == 3, "what ties, the part, and what that has started"
        finally:
            harness.kill()
    _, alive = psutil.wait_procs(started, 30)
    assert not alive
    good, hang = journal.outcomes()
    assert (len(good.cases), good.problem) == (2, "")
    assert (len(hang.cases), hang.problem) == (1, "the run was killed")
    assert load(journal.path) == [good, hang]


def test_a_later_run_goes_on_with_what_is_there(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "gpu.jsonl")
    for commit in ("first", "second"):
        for part in ("copies", "decode") if commit == "first" else ("decode",):
            journal.begin(part, {"commit": commit})
            journal.row(part, Case(commit, "of a run"))
            journal.end(part, seconds=1.0, problem="", said="")
    copies, decode = journal.outcomes()
    assert (copies.facts["commit"], [case.name for case in copies.cases]) == ("first", ["first"])
    assert (decode.facts["commit"], [case.name for case in decode.cases]) == ("second", ["second"])


def test_getting_ready_takes_of_a_parts_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed a time after it was started, however long importing torch and opening the device took."""
    now = [0.0]

    def slow(start: float) -> float:
        now[0] += start
        return now[0]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: min(0, slow(3.0)))
    assert Setting.here(20, tiny=True, clock=lambda: now[0]).left_s() == 17
    monkeypatch.setattr(child_module, "MONOTONIC", lambda: slow(1.0))
    monkeypatch.setattr("kvtier_bench.gpu.parts.copies.on_device", lambda setting: setting)
    monkeypatch.setattr(Setting, "here", lambda budget_s, *, tiny: budget_s)
    assert child_module.rows_of("copies", 20, tiny=True) == 19


def test_a_run_writes_table_and_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu.json"
    assert command.main(["--tiny", "--json", str(path), "copies"]) == 0
    (part,) = json.loads(path.read_text())["parts"]
    assert (part["part"], part["problem"], part["facts"]["tiny"]) == ("copies", "", True)
    assert {case["name"] for case in part["cases"]} == {"block_copy", "plain copy"}
    assert {"device", "torch", "triton"} <= part["facts"]["machine"].keys()
    assert date.fromisoformat(part["facts"]["date"])
    out, err = capfd.readouterr()
    assert "block_copy" in out
    assert "no figure means anything" in out
    assert "[1/1] copies" in err
    assert command.main(["--render", str(path)]) == 0
    assert "| block_copy |" in capfd.readouterr().out


@pytest.mark.parametrize(
    "error",
    [
        subprocess.TimeoutExpired("python", 120),
        subprocess.CalledProcessError(1, "python", stderr="ImportError: triton"),
    ],
)
def test_a_machine_that_does_not_answer_is_tried(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the answer that there is no device ends the run."""

    def fails(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as failing:
        failing.setattr(subprocess, "run", fails)
        facts = command.machine_facts()
    assert set(facts.values()) == {"unknown"}
    chosen: list[Part] = []
    monkeypatch.setattr(command, "machine_facts", lambda: facts)
    monkeypatch.setattr(command, "run_parts", lambda _, parts: chosen.extend(parts) or iter([]))
    assert command.main(["smoke", "--json", str(tmp_path / "gpu.json")]) == 0
    assert [part.name for part in chosen] == ["smoke"]
    assert "cannot be told" in capsys.readouterr().err


def test_results_go_to_the_folder_for_output(tmp_path: Path) -> None:
    assert command.default_path({}, tiny=False) == Path("gpu.json")
    assert command.default_path({"OUT": str(tmp_path)}, tiny=False) == tmp_path / "gpu.json"
    assert command.default_path({"OUT": str(tmp_path)}, tiny=True) == tmp_path / "gpu-tiny.json"
    assert command.default_path({"OUT": str(tmp_path / "none")}, tiny=False) == Path("gpu.json")


@pytest.mark.parametrize(
    ("seconds", "budgets"), [([], [75, 40]), (["--seconds", "584"], [375, 200]), (["--seconds", "20"], [75, 40])]
)
def test_parts_that_are_named_share_the_time_that_is_given(
    seconds: list[str], budgets: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[Part] = []
    monkeypatch.setattr(command, "machine_facts", lambda: {"device": "a GPU"})
    monkeypatch.setattr(command, "run_parts", lambda _, parts: chosen.extend(parts) or iter([]))
    assert command.main(["beside", "races", *seconds, "--json", str(tmp_path / "gpu.json")]) == 0
    assert [part.budget_s for part in chosen] == pytest.approx(budgets, abs=5)


def test_the_second_run_has_parts_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Part] = []
    monkeypatch.setattr(command, "machine_facts", lambda: {"device": "a GPU"})
    monkeypatch.setattr(command, "run_parts", lambda _, parts: chosen.extend(parts) or iter([]))
    assert command.main(["--second", "--json", str(tmp_path / "gpu.json")]) == 0
    assert chosen == list(SECOND)
    chosen.clear()
    assert command.main(["--third", "--json", str(tmp_path / "gpu.json")]) == 0
    assert {part.name: part.budget_s for part in chosen} == {"beside": 105, "races": 300, "ttft": 105}
    assert sum(part.budget_s for part in chosen) + GRACE_S < TOTAL_S
    chosen.clear()
    assert command.main(["sweep", "smoke", "--json", str(tmp_path / "gpu.json")]) == 0
    assert [part.name for part in chosen] == ["smoke", "sweep"]


def test_what_failed_and_what_falls_short_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "machine_facts", lambda: {"device": "a GPU"})
    torn = Case("selfcheck", "checks", detail="FAILED: kernel[/grid] of [red]")
    short = held_to(Case("block_copy", "to host"), Bar("x one copy", 0.8, 0.9), tiny=False)
    outcome = Outcome("checks", 1.0, (torn, short), "exit status 1", said="list[/int]")
    monkeypatch.setattr(command, "run_parts", lambda *_: iter([outcome]))
    assert command.main(["--json", str(tmp_path / "gpu.json"), "checks"]) == 1
    shown = "".join(capsys.readouterr().out.split())
    assert "list[/int]" in shown
    assert "kernel[/grid]" in shown.replace("│", "")
    assert "shortofitsbar:tohost:block_copy" in shown


def test_results_are_rendered_for_the_documentation() -> None:
    cases = (Case("ours", "a | b", gb_per_s=50.0, p50_us=1500.0, floor="plain", ratio_to_floor=0.9, detail="x"),)
    facts: dict[str, Any] = {**FACTS, "date": "2026-11-23"}
    text = markdown([Outcome("copies", 1.0, cases, "exit status 1", facts=facts)])
    assert "## copies\n\n2026-11-23, commit abc, device a GPU.\n\nThis part did not end well: exit status 1." in text
    assert "| **a \\| b** | | | | |" in text
    assert "| ours | 50.00 | 1.500 ms | 0.90x plain | x |" in text


def test_the_documentation_has_what_was_measured() -> None:
    results = load(ROOT / "benchmarks" / "results" / "2026-11-27-h200-gpu.json")
    assert (ROOT / "docs" / "gpu-results.md").read_text().endswith(markdown(results) + "\n")
    assert not any(outcome.failed for outcome in results)


def test_a_part_that_hangs_says_where(tmp_path: Path) -> None:
    script = """
import sys, time
from kvtier_bench.gpu.measuring import comparing  # torch is there before it hangs
from kvtier_bench.gpu.run import child
def hang(*_, **__):
    time.sleep(60)
child.rows_of, child.GRACE_S = hang, 0.2
child.main(["copies", sys.argv[1], "0.1"])
"""
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "journal")], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert any("in hang" in line for line in process.stderr)
        process.kill()


def test_the_exit_status_of_what_is_tied(tmp_path: Path) -> None:
    tied = [sys.executable, "-m", "kvtier_bench.gpu.run.tied"]

    def status(parent: int, *words: str) -> int:
        return subprocess.run([*tied, str(parent), *words], start_new_session=True).returncode

    assert status(os.getpid(), "sh", "-c", "exit 3") == 3
    assert status(os.getpid(), "sh", "-c", "kill -KILL $$") == 128 + signal.SIGKILL
    assert status(os.getpid() + 1, "touch", str(tmp_path / "ran")) == 128 + signal.SIGTERM, "its parent is another one"
    assert not (tmp_path / "ran").exists()


def test_output_that_is_kept_names_no_folder_of_the_machine() -> None:
    said = runner._without_paths(f'File "{Path.cwd()}/kvtier/clock.py"; File "{sys.prefix}/lib/torch/cuda.py"')
    assert said == 'File "kvtier/clock.py"; File "lib/torch/cuda.py"'
